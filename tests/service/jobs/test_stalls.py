"""When a job that runs stands still, whom it waits for, and when it is given up as hung."""

from dataclasses import replace
from typing import Any

import pytest

from agent.protocol.values import HandoffState
from service.jobs.causes import FailedPart, FirstCause
from service.jobs.crashes import HANG_KIND
from service.jobs.rules import next_action
from service.jobs.stalls import HANG_LEAST_S, hang_of, rank_at, standstill
from service.jobs.tables import JobState
from service.jobs.view import Do, JobLimits, JobView, RankAt
from tests.service.jobs.test_rules import MOVE, at, handoff, view

READS = RankAt("b", 1, at="samples (my_job.py:33)")
WAITS = RankAt("a", 0, at="all_reduce (distributed_c10d.py:2810)", waits=True)


def still(seconds: float, **changes: Any) -> JobView:
    """A job of steps of a second without one for so long."""
    values = {"step_s": 1.0, "longest_s": 2.0, "at_work": (WAITS, READS), "state_changed_at": at(-99_999)}
    return view(last_step_at=at(-seconds), **(values | changes))


@pytest.mark.parametrize(
    ("seconds", "steps", "stands"),
    [
        (31, {}, True),
        (30, {}, False),
        (100, {"step_s": 5.0, "longest_s": 6.0}, False),
        (101, {"step_s": 5.0, "longest_s": 6.0}, True),
        (101, {"step_s": 1.0, "longest_s": 51.0}, False),
        (103, {"step_s": 1.0, "longest_s": 51.0}, True),
        (101, {"step_s": 0.0, "longest_s": 6.0}, False),
        (121, {"step_s": 0.0, "longest_s": 6.0}, True),
    ],
)
def test_far_longer_than_steps_take_is_standing_still(seconds, steps, stands):
    found = standstill(still(seconds, **steps))
    assert (found is not None) == stands
    assert found is None or found.since == at(-seconds)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": JobState.STARTING},
        {"last_step_at": None},
        {"silent": ("c",)},
        {"gone": ("c",)},
        {"unheard": ("c",)},
        {"handoff": handoff(state=HandoffState.CUTTING_OVER)},
        {"listening_since": at(-29)},
        {"state_changed_at": at(-29)},
    ],
)
def test_nobody_stands_still_who_is_not_heard_or_switches_or_has_just_begun(changes):
    assert standstill(replace(still(5_000), **changes)) is None


def test_a_late_report_of_a_node_without_a_part_in_the_world_hides_nothing():
    assert standstill(still(40, unheard=("x",))) is not None


def test_the_rank_is_named_that_others_wait_for():
    found = standstill(still(40))
    assert found is not None and found.because == "rank 1 on b stands in samples (my_job.py:33)"
    assert found.cause == FirstCause(FailedPart.RANK, "b", 1, step=50)
    stopped = RankAt("c", 2, is_stopped=True)
    found = standstill(still(40, at_work=(WAITS, READS, stopped)))
    assert found is not None and (found.because, found.cause and found.cause.rank) == ("rank 2 on c is stopped", 2)
    both = standstill(still(40, at_work=(replace(READS, node="a", rank=0), READS)))
    assert both is not None and both.cause is None and both.because.startswith("rank 0 on a stands in samples")
    nobody = standstill(still(40, at_work=(WAITS, replace(WAITS, node="b", rank=1))))
    assert nobody is not None and (nobody.because, nobody.cause) == ("all ranks wait for each other", None)


def test_a_hook_that_runs_is_named_and_ends_only_after_its_own_limit():
    validates = RankAt("a", 0, hook="validate", hook_s=3_000.0)
    job = still(3_100, at_work=(validates, READS), hang_restart_s=60.0)
    found = standstill(job)
    assert found is not None and found.hook == "validate"
    assert found.because.startswith("rank 0 on a runs validate for 50 min already; hook_s_max is not set")
    assert hang_of(job) is None
    limited = replace(job, hook_s_max=2_000.0)
    assert (lost := hang_of(limited)) is not None and lost.is_hang
    assert lost.reason == "rank 0 on a runs validate for 50 min, longer than hook_s_max allows"
    assert lost.cause == FirstCause(FailedPart.RANK, "a", 0, step=50)
    assert hang_of(replace(job, hook_s_max=4_000.0)) is None


@pytest.mark.parametrize(
    ("seconds", "changes", "hangs"),
    [
        (HANG_LEAST_S, {}, False),
        (HANG_LEAST_S + 1, {}, True),
        (HANG_LEAST_S + 1, {"longest_s": 130.0}, False),
        (1_301, {"longest_s": 130.0}, True),
        (61, {"hang_restart_s": 60.0}, True),
        (59, {"hang_restart_s": 60.0}, False),
        (20, {"hang_restart_s": 10.0}, False),
        (90_000, {"hang_restart_s": 0.0}, False),
    ],
)
def test_a_world_is_given_up_after_ten_times_the_longest_step_or_what_the_job_file_says(seconds, changes, hangs):
    assert (hang_of(still(seconds, **changes)) is not None) == hangs


def test_a_hung_world_starts_from_its_checkpoint_with_the_rank_that_stood_still_as_the_cause():
    action = next_action(still(2_000), JobLimits())
    assert (action.do, action.is_hang, action.lost_steps) == (Do.START, True, 10)
    assert action.cause == FirstCause(FailedPart.RANK, "b", 1, step=50)
    assert action.reason.startswith(
        "no step was made for 33 min after step 50, though all nodes are heard; rank 1 on b stands in samples"
    )


def test_a_second_hang_after_the_same_step_fails_the_job_and_one_after_another_step_does_not():
    first = next_action(still(2_000), JobLimits()).crashes
    assert first is not None and (first.hangs, first.step) == (1, 50)
    again = next_action(still(2_000, crashes=first), JobLimits())
    assert (again.do, again.state) == (Do.SETTLE, JobState.FAILED)
    assert again.reason.startswith("the job hung 2 times after step 50; the last time: no step was made for 33 min")
    later = next_action(still(2_000, crashes=first, last_step=51), JobLimits())
    assert later.do is Do.START and later.crashes is not None and later.crashes.hangs == 1
    assert {error.kind for error in first.errors} == {HANG_KIND}


def test_a_world_that_stands_still_is_not_moved_for_gain_and_is_looked_at_often():
    action = next_action(still(40, decision=MOVE), JobLimits())
    assert (action.do, action.look_again_s) == (Do.NOTHING, 1.0)
    assert next_action(still(5, decision=MOVE), JobLimits()).do is Do.PROPOSE


def test_where_a_stopped_rank_was_before_is_not_believed():
    said = {"rank": 3, "whereabouts": {"hook": "validate", "hook_s": 9.0, "at": "x", "waits": True}}
    assert rank_at("a", said) == RankAt("a", 3, "validate", 9.0, "x", waits=True)
    assert rank_at("a", said | {"reason": {"phase": "stopped", "text": "it is"}}) == RankAt("a", 3, is_stopped=True)
