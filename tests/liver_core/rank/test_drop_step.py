"""Steps in parts are the same steps, and a handoff that drops one changes nothing but the layout.

What a run that dropped a step holds afterwards is compared, bit for bit, with a run that was handed over by
stop-and-copy at the boundary before that step.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff.messages import Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.rank.support.chain import (
    Chain,
    World,
    assert_as_megatron_loads,
    gather,
    load_with_megatron,
)
from tests.liver_core.rank.support.drops import permit_held, prepare_within_a_step
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.rank.support.job_names import JOBS
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000}
WORLDS = (World("TP2xPP2", "abcd"), World("PP3", "abc"), World("TP2xDP2", "abce"))


def in_parts(corpus: str, every: int | None = 2, arguments: dict[str, Any] | None = None, **changes: Any) -> RankSetup:
    """A batch of 12 by 1, no power of two: the loss is divided by 12, 6 or 3, whatever a part has."""
    named = {"global_batch": 12, "micro_batch": 1, "trace": True, "drop_every": every, **changes}
    return RankSetup(small_gpt(corpus, **arguments or {}), **named)


@pytest.mark.parametrize(
    ("layout", "every", "arguments", "job"),
    [
        pytest.param("TP2xPP2", 5, {"precision": "bf16"}, RankSetup.job, marks=pytest.mark.thorough),
        ("PP3", 7, {}, JOBS["dropout"]),
        pytest.param("TP2xDP2", 1, OVERLAPPED, RankSetup.job, marks=pytest.mark.thorough),
        pytest.param("DP4", 2, {"precision": "bf16", **OVERLAPPED}, JOBS["dropout"], marks=pytest.mark.thorough),
    ],
)
def test_a_step_in_parts_is_bit_for_bit_the_whole_step(
    corpus: str, layout: str, every: int, arguments: dict[str, Any], job: str
):
    setup = in_parts(corpus, None, arguments, job=job)
    whole = run_undisturbed(setup, layout, 3)
    parts = run_undisturbed(replace(setup, drop_every=every), layout, 3)
    assert parts.traces == whole.traces
    assert parts.steps == whole.steps and len(whole.steps) == 3


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16 gradients": {"precision": "bf16", "grad_reduce_in_fp32": False, **OVERLAPPED},
}


@pytest.fixture(scope="module", params=sample(PRECISIONS, "fp32"))
def setup(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> RankSetup:
    folder = str(tmp_path_factory.mktemp("boundary"))
    return in_parts(corpus, arguments=PRECISIONS[request.param], record=True, checkpoint_at_boundary=folder)


@pytest.fixture(scope="module")
def chain(setup: RankSetup) -> Chain:
    """Two handoffs, each within one step; the state after each step of the last world but one is kept."""
    measures: dict[int, list[dict[str, float]]] = {}
    dropped_at: dict[int, int] = {}
    with Cluster(setup) as cluster:
        cluster.launch(WORLDS[0].layout, WORLDS[0].nodes)
        for number, (world, following) in enumerate(itertools.pairwise(WORLDS), start=2):
            # Far enough that the run it is compared with has had its first own step when it is held.
            cluster.await_step(world.first, dropped_at.get(number - 1, 0) + 2)
            request = prepare_within_a_step(cluster, following.layout, following.nodes)
            assert cluster.verdict(world.first, request) == (str(Rung.LIVE), "")
            permit_held(cluster, request)
            cluster.await_stage(request.target.members, request, "active", 40)
            cluster.command(cluster.members(request), "retire", request.handoff_id)
            cluster.roster = request.target
            said = [cluster.stages(member, request.handoff_id)[-1][2] for member in request.target.members]
            measures[number] = said
            dropped_at[number] = max(step for generation, step, *_ in cluster.steps(world.first) if generation < number)
        cluster.await_step(WORLDS[-1].first, cluster.steps(WORLDS[-1].first)[-1][1] + 2)
        cluster.stop()
        return replace(gather(cluster, WORLDS), measures=measures, opened_at=dropped_at)


@pytest.mark.parametrize("generation", [2, 3])
def test_the_state_before_the_dropped_step_is_what_every_target_holds(chain: Chain, generation: int):
    before, after = chain.state("source", generation - 1), chain.state("target", generation)
    state = [{name: part for name, part in each.items() if not name.startswith("grad")} for each in (before, after)]
    assert {name.split("/")[0] for name in state[0]} == {"master", "exp_avg", "exp_avg_sq"}
    assert differences(*state) == []
    assert differences(chain.weights("source", generation - 1), chain.weights("target", generation)) == []
    sources, targets = chain.records[("source", generation - 1)], chain.records[("switched", generation)]
    smalls = [record["small"] for record in (*sources.values(), *targets.values())]
    assert smalls == [smalls[0]] * len(smalls)
    assert smalls[0]["step"] == chain.opened_at[generation]


def test_every_local_tensor_is_what_megatrons_own_loader_puts_there(chain: Chain, setup: RankSetup):
    folder = Path(str(setup.checkpoint_at_boundary))
    wanted = [(str(folder / f"generation-{number - 1}"), WORLDS[number - 1].layout) for number in (2, 3)]
    for generation, oracle in zip((2, 3), load_with_megatron(setup, wanted), strict=True):
        switched, gathered = chain.records[("switched", generation)], chain.records[("target", generation)]
        assert_as_megatron_loads(oracle, switched, gathered)


def test_every_step_is_that_of_a_run_that_was_handed_over_at_the_boundaries_before(chain: Chain, setup: RankSetup):
    """The last step before each drop is the one that the reference hands over."""
    reference = run_copied(setup, chain.opened_at)
    steps = min(len(chain.steps), len(reference.steps))
    assert steps >= chain.opened_at[3] + 2
    ours, theirs = ({row[1]: row[2:] for row in each.steps[:steps]} for each in (chain, reference))
    assert ours == theirs, "losses, consumed samples, digests"
    for node in "abc":
        traces = [{step: each.traces[node][step][1] for step in range(1, steps)} for each in (chain, reference)]
        assert traces[0] == traces[1], node


def test_nothing_but_state_moves_and_what_the_drop_cost_is_told(chain: Chain, setup: RankSetup):
    planned = 14 if setup.job_arguments.get("grad_reduce_in_fp32") is False else 16
    for of_ranks in chain.measures.values():
        for said in of_ranks:
            assert "gradient_bytes_at_cutover" not in said
            assert said.get("bytes_moved", 0.0) * planned == said["bytes_planned"] * 12, "masters and two moments"
        assert any(said.get("dropped_s", 0.0) > 0 for said in of_ranks)
        assert all(said.get("optimizer_s", 0.0) == 0.0 for said in of_ranks)


@pytest.mark.parametrize(
    ("every", "job", "rule"),
    [
        (2, "tests.liver_core.rank.support.stream_jobs:WholeStepsJob", "WholeStepsJob has no step_in_parts"),
        (0, RankSetup.job, "every_micro_batches: must be at least 1, is 0"),
    ],
)
def test_parts_that_cannot_be_are_refused(corpus: str, every: int, job: str, rule: str):
    with Cluster(in_parts(corpus, every, job=job)) as cluster, pytest.raises(AssertionError, match=rule):
        cluster.launch("TP1", "a")


def run_copied(setup: RankSetup, dropped_at: dict[int, int]) -> Chain:
    """The same chain by stop-and-copy: each handoff at the boundary of the step that the other run did last before it
    dropped the next one."""
    holds = tuple(step - 1 for step in dropped_at.values())
    with Cluster(replace(setup, hold_at=holds, checkpoint_at_boundary=None, record=False)) as cluster:
        cluster.launch(WORLDS[0].layout, WORLDS[0].nodes)
        for (world, following), step in zip(itertools.pairwise(WORLDS), holds, strict=True):
            sources = [Member(node, 0) for node in world.nodes]
            for member in sources:
                cluster.await_passage(member, f"step {step}")
            request = cluster.open(following.layout, following.nodes)
            members = cluster.members(request)
            cluster.await_stage(members, request, "prepared", 40)
            cluster.command(members, "permit", request.handoff_id, 1)
            cluster.await_stage(members, request, "ready", 20)
            cluster.command(sources, "release")
            cluster.await_stage(request.target.members, request, "active", 40)
            cluster.command(members, "retire", request.handoff_id)
            cluster.roster = request.target
        cluster.await_step(WORLDS[-1].first, cluster.steps(WORLDS[-1].first)[-1][1] + 2)
        cluster.stop()
        return gather(cluster, WORLDS)
