"""The job rule for starts that lose a node, or will: which failed, when the next one begins, what a notice does."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.protocol.process_end import ProcessEnd
from liver_core.handoff import FailureCause
from service.handoffs.start_times import Starts
from service.jobs.causes import FailedPart, FirstCause
from service.jobs.crashes import RankError
from service.jobs.rules import next_action
from service.jobs.tables import JobState
from service.jobs.view import Checkpoint, Damaged, Do, JobLimits, JobView, Leaving
from tests.service.jobs.test_rules import FELT, MOVE, NOTHING_FITS, act, at, view

STORE_LOST = FailureCause(FailedPart.STORE)


def starting(since_s: float = 30.0, **changes) -> JobView:
    """A job that has been restarting for so long and has made no step."""
    return view(state=JobState.STARTING, state_changed_at=at(-since_s), last_step_at=None, **changes)


def error(said: FailureCause | None, *, node: str = "a", end: ProcessEnd | None = None) -> RankError:
    return RankError(f"rank 0 on node {node} is failed", "it failed", node=node, rank=0, said=said, end=end)


def felt(*unheard: str, said: FailureCause = FELT, **changes) -> JobView:
    """Ranks of a start report only what they miss; these nodes are not heard."""
    away = tuple((name, at(-5)) for name in unheard)
    return starting(errors=(error(said),), error_at=at(-4), lost_sight_of=away, **changes)


SHUT_DOWN = RankError("rank 2 on node c is failed", "", node="c", rank=2, end=ProcessEnd(9, signal="SIGTERM"))
GOING = (Leaving("c", at(-20), at(-1)),)
TAKEN = {
    "gone": starting(gone=("c",)),
    "silent": starting(silent=("c",)),
    "missed": felt("c"),
    "several missed": felt("b", "c"),
    "missed with its store": felt("c", said=STORE_LOST),
    "silent and missed": felt("c", silent=("c",)),
    "the key was revoked": starting(revoked=("c",)),
    "the notice has run out": starting(leaving=GOING, decision=MOVE),
    "the machine shuts down": starting(errors=(SHUT_DOWN, error(FELT)), error_at=at(-4), leaving=GOING, decision=MOVE),
}
FAILED = {
    "an error of a rank": starting(errors=(error(None),), error_at=at(-4)),
    "an error beside a lost node": starting(
        errors=(error(None),), error_at=at(-4), gone=("c",), lost_sight_of=(("c", at(-40)),)
    ),
    "a peer is missed, and every node is heard": felt(),
    "a peer is missed, and a node that is no member is not heard": felt("d"),
    "its store died, and every node is heard": felt(said=STORE_LOST),
    "no step": starting(since_s=271),
    "a rank was killed, and its node stays": starting(errors=(SHUT_DOWN,), error_at=at(-4)),
    "a rank crashed on a node that will go": starting(
        errors=(replace(SHUT_DOWN, end=ProcessEnd(9, signal="SIGSEGV")),), error_at=at(-4), leaving=GOING, decision=MOVE
    ),
}


@pytest.mark.parametrize("lost", TAKEN.values(), ids=TAKEN)
def test_a_start_whose_node_was_taken_has_not_failed_and_is_followed_by_another(lost):
    action = act(replace(lost, failed_starts=2))
    assert (action.do, action.failed_start) == (Do.START, False)
    assert action.reason


@pytest.mark.parametrize("lost", FAILED.values(), ids=FAILED)
def test_a_start_that_no_lost_node_explains_has_failed(lost):
    assert (act(lost).do, act(lost).failed_start) == (Do.START, True)
    assert act(replace(lost, failed_starts=2)).state is JobState.FAILED


DAMAGED = error(FailureCause(FailedPart.CHECKPOINT, checkpoint="/c/step-000000050"))
START_FROM = Checkpoint("/other/step-000000007", 7)


def unloadable(**changes) -> JobView:
    return starting(errors=(DAMAGED,), error_at=at(-4), **changes)


def test_a_start_whose_checkpoint_is_damaged_has_not_failed_and_is_followed_by_one_from_another():
    action = act(unloadable(damaged=Damaged((50,), of_start=True), failed_starts=2))
    assert (action.do, action.failed_start, action.checkpoint) == (Do.START, False, Checkpoint("/c/40", 40))
    assert action.cause is not None and action.cause.what is FailedPart.CHECKPOINT


def test_what_ranks_say_of_a_checkpoint_excuses_a_start_only_where_it_was_noted_since():
    assert act(unloadable(damaged=Damaged((50,)))).failed_start
    assert act(unloadable(damaged=Damaged((50,)), failed_starts=2)).state is JobState.FAILED


def test_a_job_of_which_no_checkpoint_is_left_fails_and_does_not_begin_anew():
    for job in (
        unloadable(damaged=Damaged((40, 50), of_start=True), checkpoint=None),
        starting(gone=("c",), damaged=Damaged((40, 50)), checkpoint=None),
        view(state=JobState.SUSPENDED, damaged=Damaged((40, 50)), checkpoint=None),
    ):
        action = act(job)
        assert (action.do, action.state) == (Do.SETTLE, JobState.FAILED)
        assert "none of its checkpoints can be loaded, of steps 40, 50" in action.reason


def test_a_start_from_that_cannot_be_loaded_fails_the_job_and_one_that_comes_next_is_tried():
    action = act(unloadable(checkpoint=START_FROM))
    assert (action.state, action.cause) == (JobState.FAILED, DAMAGED.cause)
    assert "start_from names it" in action.reason
    tried = act(unloadable(checkpoint=START_FROM, damaged=Damaged((50,), of_start=True)))
    assert (tried.do, tried.checkpoint) == (Do.START, START_FROM)


@given(st.lists(st.sampled_from(sorted(TAKEN)), min_size=1, max_size=30), st.integers(0, 2))
def test_no_sequence_of_lost_nodes_fails_a_job_and_each_is_followed_by_a_start(losses, failed):
    """Whatever had failed before, and however long they go on."""
    started_at, limits = -30.0, JobLimits()
    for count, name in enumerate(losses, 1):
        lost = replace(TAKEN[name], failed_starts=failed, starts=Starts(None, count), state_changed_at=at(started_at))
        action = next_action(lost, limits)
        if action.do is Do.NOTHING:
            assert action.look_again_s is not None and 0 < action.look_again_s <= 120.0
            action = next_action(replace(lost, now=at(action.look_again_s)), limits)
        assert action.do is Do.START
        failed += action.failed_start


@given(st.lists(st.sampled_from([*TAKEN, *FAILED]), max_size=30))
def test_starts_that_fail_are_counted_across_those_that_nodes_ended(losses):
    failed = 0
    for name in losses:
        action = act(replace((TAKEN | FAILED)[name], failed_starts=failed))
        failed += action.failed_start
        assert (action.state is JobState.FAILED) == (failed == 3)
        if failed == 3:
            return
    assert failed == sum(name in FAILED for name in losses)


def test_ranks_of_a_start_that_only_miss_something_wait_until_each_node_is_heard_or_overdue():
    for said in (FELT, STORE_LOST):
        waiting = felt(said=said, unconfirmed=("c",), failed_starts=2)
        assert act(waiting).do is Do.NOTHING
        assert act(replace(waiting, unconfirmed=(), lost_sight_of=(("c", at(-3.1)),))).do is Do.START
        assert act(replace(waiting, unconfirmed=())).state is JobState.FAILED
    assert act(replace(FAILED["an error of a rank"], unconfirmed=("c",))).do is Do.START


def test_after_three_starts_in_a_row_without_a_step_the_next_ones_begin_ever_later():
    lost = starting(since_s=8, gone=("c",))
    assert act(replace(lost, starts=Starts(40.0, 2))).do is Do.START
    waits = act(replace(lost, starts=Starts(40.0, 3)))
    assert (waits.do, waits.look_again_s) == (Do.NOTHING, 2.0)
    assert waits.reason == (
        "c disappeared without a handoff; 3 starts in a row made no step; the next one begins at 00:00:02 UTC"
    )
    assert act(replace(lost, starts=Starts(40.0, 3), state_changed_at=at(-10))).do is Do.START
    assert act(replace(lost, starts=Starts(40.0, 90))).look_again_s == 112.0
    assert act(replace(lost, starts=Starts(40.0, 3), restart=NOTHING_FITS)).do is Do.SUSPEND


def test_a_job_that_was_suspended_again_and_again_before_a_step_waits_too_but_not_one_that_a_person_resumed():
    back = view(state=JobState.SUSPENDED, state_changed_at=at(-1), world=None, starts=Starts(None, 4))
    assert act(back).do is Do.START
    assert act(replace(back, suspended_because="c is silent")).look_again_s == 19.0
    assert act(replace(back, suspended_because="c is silent", starts=Starts(None, 2))).do is Do.START


# Notices.


def going(in_s: float | None, **changes) -> JobView:
    """A start of which c goes in so many seconds, and whose like take 40 s."""
    leaving = (Leaving("c", at(-1), None if in_s is None else at(in_s)),)
    return starting(**({"since_s": 10.0, "leaving": leaving, "decision": MOVE, "starts": Starts(40.0, 1)} | changes))


def test_a_start_whose_node_goes_before_a_handoff_is_possible_is_replaced_at_once():
    action = act(going(29.0, failed_starts=2))
    assert action.cause is not None and action.target is not None
    assert (action.do, action.failed_start, action.cause.what, action.cause.node) == (
        Do.START, False, FailedPart.NODE, "c",
    )  # fmt: skip
    assert action.reason.startswith("c goes in 29 s, and a handoff of this start needs 30 s; restart from checkpoint")
    assert "c" not in action.target.node_ids()


def test_a_start_that_can_step_before_its_node_goes_is_left_alone_and_looked_at_when_it_would_be_late():
    left = act(going(33.0, step_s=2.0))
    assert left.do is Do.NOTHING and left.look_again_s == 31.0
    assert left.reason == "starting; c will go, not before 00:00:33 UTC: the first step should come in time"
    assert act(going(31.0, step_s=2.0)).do is Do.START
    assert act(replace(going(33.0, step_s=2.0), now=at(left.look_again_s or 0.0))).do is Do.START


def test_a_start_whose_ranks_wait_for_an_older_world_needs_that_long_too():
    assert act(going(35.0)).do is Do.NOTHING
    assert act(going(35.0, steps_from_at=at(36))).do is Do.START


def test_before_any_start_of_a_job_is_timed_one_is_taken_to_need_what_the_settings_say():
    first = going(50.0, starts=Starts(None, 1))
    assert act(first).do is Do.NOTHING
    assert next_action(first, JobLimits(start_guess_s=61.0)).do is Do.START


def test_a_notice_without_an_end_leaves_a_start_alone_and_proposes_nothing():
    assert act(going(None)).do is Do.NOTHING
    assert act(going(90.0, since_s=39.0)).do is Do.NOTHING


def test_of_several_nodes_that_go_the_first_counts():
    leaving = (Leaving("b", at(-1), at(200)), Leaving("c", at(-1), at(20)))
    assert act(going(0.0, leaving=leaving)).reason.startswith("c goes in 20 s")


def test_a_start_without_enough_nodes_once_one_has_gone_is_suspended_and_says_why():
    for in_s in (20.0, 100.0):
        action = act(going(in_s, decision=NOTHING_FITS, restart=NOTHING_FITS))
        assert (action.do, action.failed_start, action.reason) == (Do.SUSPEND, False, "c will go; 1 nodes are ready")
    silent = act(going(20.0, decision=NOTHING_FITS, restart=NOTHING_FITS, silent=("b",), since_s=5.0))
    assert silent.do is Do.SUSPEND and silent.reason.startswith("c goes in 20 s")


def test_the_agents_have_their_moment_for_a_notice_from_the_first_step_on():
    noticed = view(state_changed_at=at(-1), leaving=(Leaving("c", at(-30), at(90)),), decision=MOVE)
    first = act(noticed)
    assert (first.do, first.look_again_s) == (Do.NOTHING, 2.0)
    assert act(replace(noticed, now=at(2))).do is Do.PROPOSE


def test_what_ended_a_start_is_remembered_also_where_it_counts_for_nothing():
    assert act(TAKEN["gone"]).cause == FirstCause(FailedPart.NODE, "c", step=50)
    several = act(TAKEN["several missed"]).cause
    assert several is not None and several.is_felt
