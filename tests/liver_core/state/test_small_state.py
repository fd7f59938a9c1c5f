"""The small state of a job in the next world: rates as they were set, random streams as a start at that step has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks import run_ranks
from tests.cluster.real_ranks_model import small_gpt

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

STEP = 7


@pytest.fixture(scope="module")
def moved(corpus: str) -> dict[str, Any]:
    """What a world of one rank has after the small state of another one was installed in it."""
    return run_ranks(_move, 1, corpus)[0]


def test_rates_that_were_changed_by_hand_are_those_of_the_next_world(moved: dict[str, Any]):
    assert moved["groups"] == [(0.5 + number, 0.25 + number) for number in range(len(moved["groups"]))]
    assert len(moved["groups"]) >= 2


def test_random_streams_are_those_of_a_world_that_starts_at_this_step(moved: dict[str, Any]):
    assert moved["streams"] == moved[f"streams at {STEP}"]
    assert moved["streams"] != moved["streams at 0"], "the step makes no difference to the streams"


def test_layers_that_megatron_does_not_stack_are_described_with_their_numbers(moved: dict[str, Any]):
    assert moved["described alike"]


def test_two_groups_of_the_same_settings_and_other_rates_are_refused_since_no_world_could_tell_them_apart(
    moved: dict[str, Any],
):
    assert moved["refused"].startswith("parameter groups: two have the same settings and other rates"), moved["refused"]


def test_step_and_data_position_arrive(moved: dict[str, Any]):
    assert moved["progress"] == (STEP, STEP * 8, 99)


def _move(rank: int, port: int, corpus: str) -> dict[str, Any]:
    import torch

    from liver_core.handoff.messages import StoreAddress
    from liver_core.layout import BucketRule, Member, ParallelLayout, Roster
    from liver_core.state import megatron_optimizer as megatron
    from liver_core.state.optimizer_chain import discover_kinds, optimizer_chain
    from liver_core.state.small_state import TrainingProgress, collect, install
    from liver_core.training.cursor import DataCursor
    from liver_core.worlds.groups import connect_store
    from liver_core.worlds.megatron import activate, bring_up, building, random_state, seed_streams
    from tests.cluster.real_ranks_process import make_job

    def streams() -> dict[str, bytes]:
        found = random_state()
        tracked = {name: state.numpy().tobytes() for name, state in found.tracked.items()}
        return {"torch": found.host.numpy().tobytes(), **tracked}

    job = make_job(RankSetup(small_gpt(corpus, num_layers=2)))
    made = []
    for number in (1, 2):
        store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
        roster = Roster("job", number, ParallelLayout.parse("TP1"), (Member("a", 0),))
        world = bring_up(roster, rank, store, host="127.0.0.1", timeout_s=30)
        activate(world)
        with building(world):
            state = job.build(world)
        kinds = discover_kinds(optimizer_chain(state.optimizer))
        parts = [megatron.describe(state.model, world)]
        manifest = megatron.merge_manifest(parts, state.config.num_layers, kinds, BucketRule())
        made.append((state, megatron.adopt(state.model, state.optimizer, manifest, world), world))
        # A stack that is written as if its layers differed in form: Megatron names each layer in the key.
        megatron.unwrapped(state.model).decoder.config.hetereogenous_dist_checkpoint = True
        apart = [megatron.describe(state.model, world)]
        unlike = megatron.merge_manifest(apart, state.config.num_layers, kinds, BucketRule())
    (source, live, _), (target, next_live, world) = made
    for number, group in enumerate(optimizer_chain(source.optimizer).groups):
        group["lr"], group["weight_decay"] = 0.5 + number, 0.25 + number
    progress = TrainingProgress(STEP, DataCursor(STEP * 8, job.global_batch, job.micro_batch), 99)
    small = json.loads(json.dumps(collect(job, source, live, progress)))
    expected = {}
    for step in (0, STEP):
        seed_streams(world, seed=job.seed, step=step)
        expected[f"streams at {step}"] = streams()
    torch.manual_seed(12345)
    arrived = install(small, job, target, next_live, world)
    groups = optimizer_chain(target.optimizer).groups
    rates = [(group["lr"], group["weight_decay"]) for group in groups]
    groups[1].update({name: value for name, value in groups[0].items() if name not in ("params", "lr")})
    return {
        "described alike": manifest == unlike,
        "refused": _said_of_groups(target),
        "streams": streams(),
        **expected,
        "groups": rates,
        "progress": (arrived.step, arrived.cursor.consumed, arrived.digest),
    }


def _said_of_groups(state: Any) -> str:
    from liver_core.state.built_state import check_groups
    from liver_core.state.step_counts import UnsupportedState

    try:
        check_groups(state)
    except UnsupportedState as refused:
        return str(refused)
    return ""
