"""A loss or a gradient norm that is not finite ends the job before it is applied, and never reaches a checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.liver_core.rank.test_after_step import HANDED, hand_over_step, setup_of
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

JOB = "tests.liver_core.rank.support.hooked_job:NonfiniteJob"
WHAT = {"loss": "loss", "gradient": "gradient norm"}


def breaking(corpus: str, folder: Path, bad: str, step: int, **changes: object) -> RankSetup:
    setup = setup_of(corpus, folder, job=JOB, **changes)
    setup.job_arguments.update(bad=bad, bad_step=step)
    return setup


def checkpoints_in(folder: Path) -> list[int]:
    return sorted(int(entry.name.removeprefix("step-")) for entry in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("layout", "bad"), sample(itertools.product(["DP2", "PP2"], WHAT), ("DP2", "gradient"), ("PP2", "loss"))
)
def test_the_job_fails_at_once_with_step_and_rank_and_keeps_its_checkpoints(
    corpus: str, tmp_path: Path, layout: str, bad: str
):
    with Cluster(breaking(corpus, tmp_path, bad, 3, hold_at=(), last_step=6)) as cluster:
        first, second = cluster.launch(layout, "ab").members
        results = cluster.finish()
        assert [row[1] for row in cluster.steps(first)] == [1, 2]
    assert {result["how"] for result in results.values()} == {"failed"}
    (why,) = {result["reason"] for result in results.values()}
    # The last stage computes the loss. Where gradients are split over data-parallel ranks, both hold a part of them.
    rank = 1 if (layout, bad) == ("PP2", "loss") else 0
    assert f"the {WHAT[bad]} of step 3 is nan, first on rank {rank}" in why
    assert results[second]["step"] == 2
    assert checkpoints_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("bad", sample(WHAT, "gradient"))
def test_a_step_handed_over_is_no_exception(corpus: str, tmp_path: Path, bad: str):
    """With its loss it is not handed over at all; with its gradient norm the next world does not apply it."""
    with Cluster(breaking(corpus, tmp_path, bad, HANDED)) as cluster:
        cluster.launch("PP2", "ab")
        request = hand_over_step(cluster)
        # Of a step that is not handed over the newcomer waits for the boundary. A leaver stays until it is retired.
        failing = "bc" if bad == "gradient" else "ab"
        ending = [rank for rank in cluster.ranks.values() if rank.member.node_id in failing]
        cluster.wait_for(lambda: all(rank.result is not None for rank in ending), 40, "end of the ranks")
        ends = [rank.result for rank in ending if rank.result is not None]
        assert all(row[1] < HANDED for member in cluster.members(request) for row in cluster.steps(member))
    assert {end["how"] for end in ends} == {"failed"}
    assert all(f"the {WHAT[bad]} of step {HANDED} is nan" in end["reason"] for end in ends)
    assert checkpoints_in(tmp_path) == list(range(1, HANDED))


def test_a_job_that_goes_on_writes_no_checkpoint_that_is_not_finite(corpus: str, tmp_path: Path):
    setup = breaking(corpus, tmp_path, "gradient", 3, hold_at=(), last_step=5, stops_at_nonfinite=False)
    with Cluster(setup) as cluster:
        (first, _) = cluster.launch("DP2", "ab").members
        results = cluster.finish()
        assert [row[1] for row in cluster.steps(first)] == [1, 2, 3, 4, 5]
        failures = [event[2] for event in cluster.ranks[first].events if event[0] == "checkpoint_failed"]
    assert {result["how"] for result in results.values()} == {"finished"}
    assert checkpoints_in(tmp_path) == [1, 2]
    assert len(failures) == 3 and all(
        "not written, rank 0: " in text and text.endswith("is not finite") for text in failures
    ), failures
