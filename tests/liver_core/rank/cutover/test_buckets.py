"""Handoffs of a job with Megatron's usual data-parallel settings: several gradient buckets, reduced while backward goes
on, and weights gathered while forward goes on.

By the two oracles of `test_exactness`; the number of buckets, and what a rank owns of them, change with the layout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff.messages import Rung
from liver_core.layout import ParallelLayout, shard_ranges
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks import run_alone
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.cutover.test_failures import assert_started_at_the_version_held
from tests.liver_core.rank.support.chain import (
    Chain,
    World,
    assert_as_megatron_loads,
    gather,
    load_with_megatron,
    run_chain,
)
from tests.liver_core.rank.support.global_state import differences
from tests.liver_core.rank.support.trio import (
    LEAVER,
    SHORT,
    SURVIVOR,
    Trio,
    assert_trained_as_if_nothing_had_happened,
    trio_setup,
)
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000}
WORLDS = (World("TP2xPP2", "abcd"), World("PP3", "abc"), World("TP2xDP2", "abce"), World("DP4", "ecba"))
HANDOFFS = range(2, len(WORLDS) + 1)
PACE_S = 0.4
LIVE, COPIED = Rung.LIVE, Rung.STOP_AND_COPY
MODES = [
    (precision, rungs) for precision in ("fp32", "bf16") for rungs in ((LIVE, COPIED, LIVE), (COPIED, LIVE, COPIED))
]
"""With --thorough every handoff in either precision and by either rung."""


def overlapped(corpus: str, **changes: Any) -> RankSetup:
    """A batch of 8 by 1: every layout here accumulates gradients over two micro-batches or more."""
    arguments = small_gpt(corpus, **OVERLAPPED | changes.pop("arguments", {}))
    return RankSetup(arguments, micro_batch=1, **changes)


@pytest.fixture(
    scope="module",
    params=[MODES[0], *(pytest.param(mode, marks=pytest.mark.thorough) for mode in MODES[1:])],
    ids=lambda mode: "-".join((mode[0], *mode[1])),
)
def mode(request: pytest.FixtureRequest) -> tuple[str, tuple[Rung, ...]]:
    return request.param


@pytest.fixture(scope="module")
def setup(mode: tuple[str, tuple[Rung, ...]], corpus: str, tmp_path_factory: pytest.TempPathFactory) -> RankSetup:
    folder = str(tmp_path_factory.mktemp("boundary"))
    return overlapped(
        corpus, arguments={"precision": mode[0]}, record=True, checkpoint_at_boundary=folder, pace_s=PACE_S
    )


@pytest.fixture(scope="module")
def chain(setup: RankSetup, mode: tuple[str, tuple[Rung, ...]]) -> Chain:
    return run_chain(setup, WORLDS, rung=mode[1], steps_each=2, steps_last=2)


def test_several_buckets_are_what_is_handed_over(chain: Chain):
    counts = [
        [
            len(shard_ranges(chain.manifest, ParallelLayout.parse(world.layout), rank).buckets)
            for rank in range(len(world.nodes))
        ]
        for world in WORLDS
    ]
    assert counts == [[4, 4, 1, 1], [4, 1, 1], [7] * 4, [10] * 4]


def test_masters_moments_gradients_and_weights_are_bit_for_bit_what_the_old_world_held(chain: Chain):
    for generation in HANDOFFS:
        before, after = chain.state("source", generation - 1), chain.state("target", generation)
        assert {name.split("/")[0] for name in before} == {"master", "exp_avg", "exp_avg_sq", "grad"}
        assert differences(before, after) == [], generation
        weights = [chain.weights("source", generation - 1), chain.weights("target", generation)]
        assert differences(*weights) == [], generation


def test_every_local_tensor_is_what_megatrons_own_loader_puts_there(chain: Chain, setup: RankSetup):
    folder = Path(str(setup.checkpoint_at_boundary))
    wanted = [(str(folder / f"generation-{number - 1}"), WORLDS[number - 1].layout) for number in HANDOFFS]
    for generation, oracle in zip(HANDOFFS, load_with_megatron(setup, wanted), strict=True):
        switched, gathered = chain.records[("switched", generation)], chain.records[("target", generation)]
        assert_as_megatron_loads(oracle, switched, gathered)


def test_no_byte_moves_twice_and_what_streams_leaves_only_gradients_for_the_pause(
    chain: Chain, mode: tuple[str, tuple[Rung, ...]]
):
    for rung, of_ranks in zip(mode[1], chain.measures.values(), strict=True):
        for said in of_ranks:
            assert said.get("bytes_moved", 0.0) == said["bytes_planned"] == said["bytes_lower_bound"]
            assert (said.get("bytes_streamed", 0.0) > 0) == (rung is Rung.LIVE and said["bytes_planned"] > 0)
            if rung is Rung.LIVE:
                assert said.get("gradient_bytes_at_cutover", 0.0) * 4 == said["bytes_planned"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("precision", "rung", "gathers"),
    [("fp32", LIVE, True), ("bf16", COPIED, False)],
)
def test_in_the_same_layout_every_later_step_is_bit_for_bit_that_of_a_job_left_alone(
    corpus: str, precision: str, rung: Rung, gathers: bool
):
    """Nothing but places changes, so weights gathered late, or gradients put in the wrong bucket, show in the bits.

    Recording gathers the next world's weights before GO: they must be gathered again after the step.
    """
    arguments = {"precision": precision, "overlap_param_gather": gathers}
    setup = overlapped(corpus, arguments=arguments, trace=True, record=True, pace_s=PACE_S)
    worlds = (World("DP2", "ab"), World("DP2", "cb"), World("DP2", "bd"))
    chain = run_chain(setup, worlds, rung=rung)
    alone = run_undisturbed(setup, "DP2", chain.steps[-1][1])
    ours = {
        (worlds[generation - 1].nodes.index(node), step): digest
        for node, trace in chain.traces.items()
        for step, (generation, digest) in trace.items()
    }
    expected = {
        ("ab".index(node), step): digest for node, trace in alone.traces.items() for step, (_, digest) in trace.items()
    }
    assert expected.keys() <= ours.keys() and len(expected) > 2 * 9
    assert [place for place, digest in sorted(expected.items()) if ours[place] != digest] == []
    losses = alone.losses()
    assert {step: loss for step, loss in chain.losses().items() if step in losses} == losses


@pytest.mark.thorough
def test_an_abort_before_go_leaves_the_old_world_bit_for_bit_as_it_was(corpus: str):
    """The newcomer dies between boundary and decision; another one would cut its buckets otherwise."""
    setup = trio_setup(corpus, job_arguments=small_gpt(corpus, num_layers=2, **OVERLAPPED), micro_batch=1)
    with Trio(setup, "DP2") as job:
        job.begin()
        request, newcomer = job.ready(Fault("gradients read", "kill"), cutover=SHORT)
        job.permit(request)
        for member in (LEAVER, SURVIVOR):
            assert "rank" in job.reason(member, request, "aborted")
        job.kill(newcomer)
        job.trains_on()
        job.setup = replace(setup, job_arguments=setup.job_arguments | {"ddp_bucket_size": 5000})
        request, newcomer = job.attempt()
        reason = job.reason(newcomer, request, "aborted")
        assert "rank 1, lay out state: StateMismatch: gradient bucket 0: Megatron has (" in reason, reason
        job.setup = setup
        job.abort(request)
        job.trains_on()
        assert_trained_as_if_nothing_had_happened(job)


def test_a_batch_that_is_done_again_starts_from_gathered_weights(corpus: str):
    """A leaver is lost after its masters were read and before its gradients were."""
    arguments = small_gpt(corpus, num_layers=2, **OVERLAPPED)
    setup = trio_setup(corpus, job_arguments=arguments, micro_batch=1, record=True, bring_up_s=8.0)
    with Trio(setup, "DP2") as job:
        job.begin()
        job.arm(LEAVER, "norm", "hold")
        job.arm(SURVIVOR, "state read", "tell")
        request, newcomer = job.ready(Fault("state read", "tell"), cutover=SHORT)
        job.permit(request)
        job.await_passage(LEAVER, "norm")
        for member in (SURVIVOR, newcomer):
            job.await_passage(member, "state read")
        job.kill(LEAVER)
        for member in (SURVIVOR, newcomer):
            job.await_stage([member], request, "active", 30)
        assert_started_at_the_version_held(job, newcomer)


def test_a_checkpoint_between_two_steps_holds_whole_weights_and_comes_back_in_another_layout(
    corpus: str, tmp_path: Path
):
    """After a step a rank has only its own part of the weights, until the next forward pass gathers them."""
    setup = overlapped(corpus, trace=True, last_step=4, checkpoints=(str(tmp_path), 2, 4))
    with Cluster(setup) as cluster:
        cluster.launch("DP2", "ab")
        cluster.finish()
        written = gather(cluster, (World("DP2", "ab"),))
    alone = run_undisturbed(replace(setup, checkpoints=None), "DP2", 4)
    assert written.traces == alone.traces, "gathering for a checkpoint changed training"
    path = str(tmp_path / "step-000000002")
    whole, sharded = load_with_megatron(setup, [(path, "TP1"), (path, "TP2xDP2")])
    for name, tensors in whole[0]["megatron"].items():
        assert tensors["param"].tobytes() == whole[0]["weights"][name].tobytes(), f"weight {name} is not its master"
    back = overlapped(corpus, record=True, last_step=4)
    with Cluster(back) as cluster:
        cluster.launch("TP2xDP2", "abcd", checkpoint=path)
        cluster.finish()
        chain = gather(cluster, (World("TP2xDP2", "abcd"),))
    assert_as_megatron_loads(sharded, chain.records[("switched", 1)], chain.records[("target", 1)])
    assert [(row[1], row[3], row[4]) for row in chain.steps] == [
        (row[1], row[3], row[4]) for row in alone.steps if row[1] > 2
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"overlap_grad_reduce": False}, "overlap_param_gather: needs overlap_grad_reduce"),
        ({"overlap_grad_reduce": False, "overlap_param_gather": False}, "ddp_bucket_size: needs overlap_grad_reduce"),
        ({"ddp_bucket_size": 0}, "ddp_bucket_size\n  Input should be greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(corpus: str, settings: dict[str, Any], said: str):
    assert said in run_alone(_refusal, small_gpt(corpus, **OVERLAPPED | settings))


def _refusal(arguments: dict[str, Any]) -> str:
    from liver_core.training.gpt import GptJob

    try:
        GptJob(arguments, global_batch=8, micro_batch=1, seed=7)
    except ValueError as error:
        return str(error)
    return "accepted"
