"""A handoff that fails after the step was dropped: the old world does the batch again, and no step shows it.

The job draws random numbers in its forward passes, so that streams which were not put back would show in the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from liver_core.handoff.messages import CutoverDeadlines, Rung
from liver_core.layout import Member
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.support.drops import hold_at, permit_held
from tests.liver_core.rank.support.job_names import JOBS
from tests.liver_core.rank.support.trio import (
    LEAVER,
    SHORT,
    SURVIVOR,
    UNHURRIED,
    Trio,
    assert_trained_as_if_nothing_had_happened,
    trio_setup,
)
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

AFTER_THE_DROP = ("boundary", "state read", "certificate", "barrier")


class DropTrio(Trio):
    """As Trio, but steps are dropped."""

    def open(self, *arguments: Any, **named: Any) -> Any:
        return super().open(*arguments, **{"rung": Rung.DROP_STEP, **named})

    def dropping(self, *faults: Fault, cutover: CutoverDeadlines = UNHURRIED, part: int = 1) -> tuple[Any, Member]:
        """Prepare, and permit after so many of the eight parts of a step."""
        request, newcomer = self.ready(*faults, cutover=cutover)
        hold_at(self, LEAVER, part)
        permit_held(self, request)
        return request, newcomer


@pytest.fixture(scope="module")
def job(corpus: str) -> Iterator[DropTrio]:
    setup = trio_setup(
        corpus, global_batch=8, micro_batch=1, drop_every=1, job=JOBS["dropout"], stream={"tile_elements": 4096}
    )
    with DropTrio(setup) as trio:
        trio.begin()
        yield trio


@pytest.mark.parametrize("point", sample(AFTER_THE_DROP, "state read", "barrier"))
@pytest.mark.parametrize("action", sample(["kill", "stall"], "kill"))
def test_the_newcomer_dies_or_stalls_between_the_drop_and_the_decision(job: DropTrio, point: str, action: str):
    request, newcomer = job.dropping(Fault(point, action), cutover=SHORT)
    for member in (LEAVER, SURVIVOR):
        assert "rank" in job.reason(member, request, "aborted")
    assert job.stages(LEAVER, request.handoff_id)[-1][2]["dropped_s"] > 0
    job.kill(newcomer)
    job.trains_on()


def test_it_is_aborted_between_two_parts_and_that_is_said_before_the_step_ends(job: DropTrio):
    request, newcomer = job.ready()
    hold_at(job, LEAVER, 1)
    at = job.steps(LEAVER)[-1][1]
    job.abort(request)
    job.command([LEAVER], "release")
    for member in (LEAVER, SURVIVOR, newcomer):
        assert "the notice was withdrawn" in job.reason(member, request, "aborted")
    job.await_step(LEAVER, at + 2)
    said = [event[:3] for event in job.ranks[LEAVER].events]
    assert said.index(("stage", request.handoff_id, "aborted")) < said.index(("step", 1, at + 1))
    assert "dropped_s" not in job.stages(LEAVER, request.handoff_id)[-1][2]


@pytest.mark.timeout(400)  # as many steps as all tests above took
def test_after_all_this_every_step_was_that_of_a_job_left_alone(job: DropTrio):
    assert_trained_as_if_nothing_had_happened(job)


def test_a_step_whose_end_comes_in_time_is_not_dropped(corpus: str):
    setup = trio_setup(
        corpus, global_batch=8, micro_batch=1, drop_every=1, drop_reserve_s=5.0, stream={"tile_elements": 4096}
    )
    with DropTrio(setup) as trio:
        trio.begin()
        request, _ = trio.dropping(part=6)
        trio.await_stage(request.target.members, request, "active", 40)
        said = trio.stages(SURVIVOR, request.handoff_id)[-1][2]
        assert "dropped_s" not in said and said["gradient_bytes_at_cutover"] > 0


@pytest.mark.thorough
def test_the_leaver_dies_after_the_drop_and_the_next_world_does_the_batch_all_the_same(corpus: str):
    setup = trio_setup(corpus, global_batch=8, micro_batch=1, drop_every=1, stream={"tile_elements": 4096})
    with DropTrio(setup) as trio:
        trio.begin()
        trio.arm(LEAVER, "state read", "hold")
        trio.arm(SURVIVOR, "state read", "tell")
        request, newcomer = trio.dropping(Fault("state read", "tell"), Fault("part 1", "hold"))
        for member in (LEAVER, SURVIVOR, newcomer):
            trio.await_passage(member, "state read")
        trio.kill(LEAVER)
        # The newcomer stands in its first step, which may outlast every deadline: its agent has to know before.
        trio.await_stage([newcomer], request, "cutting_over", 40)
        assert not trio.steps(newcomer)
        trio.command([newcomer], "release")
        trio.await_stage(request.target.members, request, "active", 40)
        trio.await_death(LEAVER)
        assert trio.steps(newcomer)[0][1] == trio.steps(LEAVER)[-1][1] + 1


@pytest.mark.thorough
def test_a_state_that_cannot_stream_is_copied_after_the_drop_and_a_damaged_one_refused_by_name(corpus: str):
    setup = trio_setup(corpus, global_batch=8, micro_batch=1, drop_every=1, job=JOBS["fused"])
    with DropTrio(setup) as trio:
        trio.begin()
        request, newcomer = trio.dropping(Fault("state read", "corrupt"))
        assert "1 differ" in trio.reason(newcomer, request, "aborted")
        for member in (LEAVER, SURVIVOR):
            assert "rank" in trio.reason(member, request, "aborted")
        trio.trains_on()
        request, newcomer = trio.dropping()
        trio.await_stage(request.target.members, request, "active", 40)
        said = dict(trio.stages(newcomer, request.handoff_id)[-1][2])
        assert said["bytes_moved"] * 4 == said["bytes_planned"] * 3, "masters and two moments, without gradients"
        assert any("replay" in str(reason) for _, reason, _ in trio.stages(newcomer, request.handoff_id))
        handed = max(step for _, step, *_ in trio.steps(LEAVER))
        trio.roster = request.target
        trio.trains_on(request.target.members)
        assert trio.steps(newcomer)[0][1] == handed + 1, "the dropped step is done, and once"
