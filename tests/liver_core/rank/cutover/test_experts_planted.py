"""Mistakes in the product's own code that handoffs with experts could have: each is caught, and it is said by what."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_core.handoff.messages import Rung
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.liver_core.rank.cutover.test_experts import (
    BIAS,
    STEPS_AFTER,
    assert_as_restarts,
    assert_its_checkpoint_is_whole,
    moe,
)
from tests.liver_core.rank.cutover.test_experts_lost import (
    SOURCE,
    TARGET,
    ExpertTrio,
    assert_goes_on_as_a_restart,
    setup_of,
)
from tests.liver_core.rank.support.chain import World, run_chain

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(240)]

PLANTED = "tests.liver_core.rank.support.planted_experts:"
SPREAD, ALONE = World("DP2xEP2", "ab"), World("TP1", "b")


def setup_with(corpus: str, folder: Path, mistake: str, **job: object) -> RankSetup:
    return RankSetup(
        moe(corpus, **BIAS, **job),
        job=PLANTED + mistake,
        trace=True,
        checkpoints=(str(folder), 1, 1_000),
        pace_s=0.25,
    )


@pytest.mark.parametrize("mistake", ["ShardedOverAllOfDp", "ExpertsFirst"])
def test_before_anything_moves_the_layout_is_not_that_of_megatrons_buffers(corpus: str, tmp_path: Path, mistake: str):
    with (
        Cluster(setup_with(corpus, tmp_path, mistake)) as cluster,
        pytest.raises(AssertionError, match="StateMismatch: "),
    ):
        cluster.launch(SPREAD.layout, SPREAD.nodes)


@pytest.mark.parametrize(
    ("mistake", "worlds", "job"),
    [
        ("ExpertsOfTheOtherRank", (SPREAD, ALONE), {}),
        ("BiasOfTheStepBefore", (SPREAD, ALONE), {}),
        ("RoundedBias", (World("TP1", "a"), World("DP2xEP2", "ab")), {"precision": "bf16"}),
    ],
)
def test_the_steps_after_it_are_not_those_of_a_restart(
    corpus: str, tmp_path: Path, mistake: str, worlds: tuple[World, ...], job: dict
):
    setup = setup_with(corpus, tmp_path, mistake, **job)
    chain = run_chain(setup, worlds, rung=Rung.LIVE, steps_each=STEPS_AFTER + 2, steps_last=STEPS_AFTER + 2)
    with pytest.raises(AssertionError, match=r"\(2, '[ab]', "):
        assert_as_restarts(chain, setup, worlds, tmp_path)


def test_a_checkpoint_of_the_step_handed_over_is_not_of_that_step(corpus: str, tmp_path: Path):
    setup = setup_with(corpus, tmp_path, "CheckpointOneStepAhead")
    chain = run_chain(setup, (SPREAD, ALONE), rung=Rung.LIVE, steps_each=2, steps_last=STEPS_AFTER + 2)
    with pytest.raises(AssertionError, match=r"\(2, 'b', "):
        assert_its_checkpoint_is_whole(chain, setup, (SPREAD, ALONE), 2)


def test_a_world_with_another_chain_counts_other_steps(corpus: str, tmp_path: Path):
    setup = setup_with(corpus, tmp_path, "GroupKeySaysWhereItLies")
    with pytest.raises(AssertionError, match=r"step counts: .* differ"):
        run_chain(setup, (World("TP1", "a"), SPREAD), rung=Rung.STOP_AND_COPY, steps_each=2)


def test_a_step_that_is_done_again_is_not_that_of_a_restart(corpus: str, tmp_path: Path):
    with ExpertTrio(setup_of(corpus, job=f"{PLANTED}BiasOfTheStepAfter"), SOURCE, TARGET) as job:
        job.rung = Rung.RESCUE
        job.begin()
        request, newcomer = job.ready()
        job.permit(request)
        stands = job.switches(request, newcomer)
        with pytest.raises(AssertionError, match="Member"):
            assert_goes_on_as_a_restart(job, newcomer, stands, tmp_path)
