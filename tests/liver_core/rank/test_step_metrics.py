"""The numbers of a job stay one unbroken run: each step once, in order, through a handoff and a restart."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.rank_cluster import Cluster
from tests.liver_core.rank.support.event_reader import read_run
from tests.liver_core.rank.support.hooked_job import notes_of
from tests.liver_core.rank.test_after_step import HANDED, hand_over_step, setup_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LAST = 2 * HANDED
RESTART = HANDED + 1
"""The checkpoint that the restart begins from; the first world after the handoff goes on beyond it."""
JOB = "tests.liver_core.rank.support.hooked_job:ReportingJob"
NAMES = {"loss", "learning_rate", "gradient_norm", "own/half", "own/odd"}


def test_the_numbers_of_a_job_are_one_run_through_a_handoff_and_a_restart(corpus: str, tmp_path: Path):
    folder = tmp_path / "tensorboard"
    setup = setup_of(corpus, tmp_path, job=JOB, tensorboard=str(folder), last_step=LAST)
    with Cluster(setup) as cluster:
        cluster.launch("PP2", "ab")
        request = hand_over_step(cluster)
        cluster.await_stage(request.target.members, request, "active", 40)
        measures = [cluster.stages(member, request.handoff_id)[-1][2] for member in request.target.members]
        cluster.command(cluster.members(request), "retire", request.handoff_id)
        cluster.await_step(request.target.members[0], RESTART + 2)
        cluster.wait_for(lambda: read_run(folder / "job").steps("loss")[-1] > RESTART, 20, "event files")
        for member in request.target.members:
            cluster.kill(member)
        said = {
            rank.member.node_id: [event for event in rank.events if event[0] == "metrics"] for rank in cluster.all_ranks
        }
    # The last stage's first rank of the first world, and the first rank of the second: one at a time.
    assert [event[1:3] for event in said["b"]] == [(1, step) for step in range(1, HANDED)] + [
        (2, step) for step in range(HANDED, HANDED + len(said["b"]) - HANDED + 1)
    ]
    assert said["a"] == said["c"] == []
    before = read_run(folder / "job")
    with Cluster(replace(setup, hold_at=())) as again:
        again.generation = 100_000
        again.launch("TP1", "x", checkpoint=str(tmp_path / f"step-{RESTART:09d}"))
        again.finish()
    run = read_run(folder / "job")
    assert run.names() == NAMES | {"validation"}
    for name in NAMES:
        assert run.steps(name) == [*range(1, LAST + 1)]
    assert run.values("own/half") == [step / 2 for step in range(1, LAST + 1)]
    assert [math.isnan(value) for value in run.values("own/odd")] == [step % 2 == 1 for step in range(1, LAST + 1)]
    assert (run.steps("validation"), run.values("validation")) == ([HANDED, LAST], [10.0 * HANDED, 10.0 * LAST])
    # Steps that are done again have the numbers that they had, and the newer ones are shown.
    for name in ("loss", "learning_rate", "gradient_norm"):
        assert run.values(name)[: len(before.steps(name))] == pytest.approx(before.values(name), rel=1e-4)
    notes = notes_of(tmp_path / "notes", 100_001, 0)
    rates = {note["step"]: note["rate"] for note in notes if note["hook"] == "on_step"}
    assert run.values("learning_rate")[RESTART + 1 :] == pytest.approx(
        [rates[step] for step in range(RESTART + 1, LAST)]
    )
    # The step that was handed over is published after the pause.
    assert before.times("loss")[HANDED - 1] >= max(part["first_forward_at_utc"] for part in measures)
