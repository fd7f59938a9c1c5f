"""The job rule, on its own: every answer it gives and the reason it gives for it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import HandoffState, Placement
from liver_core.handoff import FailureCause
from liver_core.layout import Member, ParallelLayout
from service.handoffs.rules import Declined, OpenHandoff, accepts_active, went_through
from service.jobs.causes import FailedPart, FirstCause
from service.jobs.crashes import RankError
from service.jobs.losses import GONE_PATIENCE_S
from service.jobs.rules import SUSPENDED_BECAUSE_CHARS_MAX, deadline_of, next_action
from service.jobs.tables import ENDED, JobState, SourceKind
from service.jobs.view import Action, Checkpoint, Do, JobLimits, JobView, Leaving, Loss
from service.planner.inputs import PlannerDecision, PlannerVerdict, World

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FELT = FailureCause(FailedPart.PEER)
MEMBERS = tuple(Member(node_id=name, slot=0) for name in "abc")
TARGET = Placement(layout=ParallelLayout(pp=2), members=MEMBERS[:2])
STAY = PlannerDecision(PlannerVerdict.STAY, "nothing better")
MOVE = PlannerDecision(PlannerVerdict.MOVE, "a better layout", TARGET)
START = PlannerDecision(PlannerVerdict.START, "start there", TARGET)
NOTHING_FITS = PlannerDecision(PlannerVerdict.SUSPEND, "1 nodes are ready")


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def view(**changes) -> JobView:
    """A job that has been running quietly for a minute."""
    values = {
        "state": JobState.RUNNING,
        "state_changed_at": at(-60),
        "now": NOW,
        "decision": STAY,
        "restart": START,
        "world": World(1, ParallelLayout(pp=3), MEMBERS),
        "source": SourceKind.INIT,
        "last_step": 50,
        "last_step_at": at(-1),
        "checkpoint": Checkpoint("/c/40", 40),
    }
    return JobView(**(values | changes))


def handoff(**changes) -> OpenHandoff:
    values = {
        "handoff_id": uuid4(),
        "state": HandoffState.PREPARING,
        "leaving": ("c",),
        "target_nodes": ("a", "b"),
        "opened_at": at(-5),
        "changed_at": at(-1),
        "deadline_at": at(100),
    }
    return OpenHandoff(**(values | changes))


def act(job: JobView) -> Action:
    return next_action(job, JobLimits())


@pytest.mark.parametrize("state", ENDED)
def test_an_ended_job_is_left_alone_whatever_happens(state):
    assert act(view(state=state, broken=(Loss("x", None),), stop_requested=True)).do is Do.NOTHING


def test_a_quiet_job_stays_and_says_why():
    assert act(view()) == Action(Do.NOTHING, "nothing better")


def test_a_stop_comes_before_everything_else():
    action = act(view(stop_requested=True, broken=(Loss("x", None),), leaving=(Leaving("c", at(-9), None),)))
    assert (action.do, action.state) == (Do.SETTLE, JobState.STOPPING)


def test_a_job_that_never_ran_stops_at_once():
    for state in (JobState.PENDING, JobState.SUSPENDED):
        assert act(view(state=state, stop_requested=True)).state is JobState.STOPPED


def test_stopping_ends_when_no_rank_is_left_or_after_a_while_with_the_number_said():
    stopping = view(state=JobState.STOPPING, state_changed_at=at(-5), ranks_left=2)
    assert act(stopping).do is Do.NOTHING
    assert act(replace(stopping, ranks_left=0)).state is JobState.STOPPED
    late = act(replace(stopping, state_changed_at=at(-61)))
    assert (late.state, late.reason) == (JobState.STOPPED, "stopped on request; 2 ranks did not end within 60 s")


@pytest.mark.parametrize("state", [JobState.STOPPING, JobState.SUSPENDING])
def test_ranks_that_write_a_checkpoint_before_they_end_have_time_for_it(state):
    ending = view(state=state, state_changed_at=at(-100), ranks_left=2)
    assert act(ending).do is Do.SETTLE
    assert act(replace(ending, saves_at_end=True)).do is Do.NOTHING
    late = act(replace(ending, saves_at_end=True, state_changed_at=at(-181)))
    assert late.reason.endswith("2 ranks did not end within 180 s")


def test_a_notice_is_left_to_the_agents_for_a_moment_and_then_answered_for_all_noticed_nodes():
    leaving = (Leaving("b", at(-30), at(90)), Leaving("c", at(-1), at(80)))
    noticed = view(leaving=leaving, decision=MOVE)
    first = act(noticed)
    assert (first.do, first.look_again_s) == (Do.NOTHING, 2.0)
    then = act(replace(noticed, now=at(2)))
    assert (then.do, then.leaving, then.target) == (Do.PROPOSE, leaving, TARGET)
    assert deadline_of(then.leaving) == at(80)


def test_after_an_aborted_handoff_the_agents_have_their_moment_again():
    noticed = view(leaving=(Leaving("c", at(-30), None),), decision=MOVE, last_handoff_at=at(-1))
    assert act(noticed).do is Do.NOTHING
    assert act(replace(noticed, now=at(2))).do is Do.PROPOSE


def test_a_notice_that_leaves_too_few_nodes_suspends():
    action = act(view(leaving=(Leaving("c", at(-30), None),), decision=NOTHING_FITS))
    assert (action.do, action.reason) == (Do.SUSPEND, "c will go; 1 nodes are ready")


def test_a_notice_that_leaves_too_few_nodes_suspends_at_once_unless_a_silent_one_may_come_back():
    noticed = view(leaving=(Leaving("c", at(-0.1), at(15)),), decision=NOTHING_FITS)
    assert act(noticed).do is Do.SUSPEND
    assert act(replace(noticed, silent=("b",))).do is Do.NOTHING
    assert act(replace(noticed, silent=("b",), now=at(3))).do is Do.SUSPEND


@pytest.mark.parametrize(
    ("changes", "saves"),
    [
        ({}, True),
        ({"checkpoint": None}, True),
        ({"checkpoint": Checkpoint("/c/40", 40, at(-31))}, True),
        ({"checkpoint": Checkpoint("/c/49", 49, at(-29))}, False),
        ({"saves_soon": True}, False),
        ({"saves_at_end": False}, False),
    ],
)
def test_a_notice_that_the_agents_did_not_answer_has_a_checkpoint_written_unless_there_is_a_newer_one(changes, saves):
    noticed = {"leaving": (Leaving("c", at(-30), at(90)),), "decision": MOVE, "saves_at_end": True}
    action = act(view(**(noticed | changes)))
    assert (action.do, action.save) == (Do.PROPOSE, saves)


def test_an_open_handoff_is_left_to_its_agents():
    open_one = view(handoff=handoff(), leaving=(Leaving("c", at(-30), None),), decision=MOVE)
    assert act(open_one).do is Do.NOTHING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": HandoffState.PROPOSED, "opened_at": at(-16)}, "no agent opened it within 15 s"),
        ({"changed_at": at(-241)}, "no report of it for 241 s"),
    ],
)
def test_a_handoff_that_nobody_drives_is_dropped(changes, reason):
    assert act(view(handoff=handoff(**changes))) == Action(Do.DROP_HANDOFF, reason)


def test_a_proposal_that_does_not_answer_a_later_notice_is_dropped_before_it_is_opened():
    leaving = (Leaving("c", at(-30), None), Leaving("b", at(-1), None))
    proposed = view(handoff=handoff(state=HandoffState.PROPOSED), leaving=leaving)
    assert act(proposed).reason == "not opened yet, and it does not answer the notice for b"
    assert act(replace(proposed, handoff=handoff())).do is Do.NOTHING


def test_growth_waits_until_the_job_has_been_quiet():
    assert act(view(decision=MOVE)).do is Do.PROPOSE
    assert act(view(decision=MOVE, last_handoff_at=at(-1))).do is Do.NOTHING
    assert act(view(decision=MOVE, silent=("b",))).do is Do.NOTHING


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        (
            {"broken": (Loss("rank 2 on node c is failed: out of memory", None),)},
            "rank 2 on node c is failed: out of memory",
        ),
        ({"gone": ("c",), "last_step_at": at(-6)}, "c disappeared without a handoff"),
        ({"silent": ("c",), "last_step_at": at(-21)}, "c is silent and no step was made for 21 s"),
    ],
)
def test_a_lost_world_comes_back_from_its_checkpoint_with_the_lost_steps_said(changes, loss):
    action = act(view(**changes))
    assert (action.do, action.checkpoint, action.lost_steps) == (Do.START, Checkpoint("/c/40", 40), 10)
    assert action.reason == f"{loss}; restart from checkpoint of step 40, 10 steps lost; start there"


def test_without_a_checkpoint_a_lost_world_begins_again_and_says_so():
    action = act(view(gone=("c",), last_step_at=at(-30), checkpoint=None))
    assert (action.checkpoint, action.lost_steps) == (None, 50)
    assert "restart from its beginning (there is no checkpoint), 50 steps lost" in action.reason


@pytest.mark.parametrize("lost", ["gone", "silent"])
def test_a_leaver_that_a_rescue_has_released_is_no_loss_while_the_next_world_is_built(lost: str):
    building = handoff(state=HandoffState.CUTTING_OVER, may_lose_leavers=True)
    stalled = {lost: ("c",), "last_step_at": at(-200)}
    assert act(view(**stalled, handoff=building)).do is Do.NOTHING
    assert act(view(**stalled, handoff=handoff(state=HandoffState.CUTTING_OVER))).do is Do.START
    # It is so for who leaves only, and only while the handoff is open.
    assert act(view(**(stalled | {lost: ("b",)}), handoff=building)).do is Do.START
    assert act(view(**stalled)).do is Do.START


@pytest.mark.parametrize("lost", ["gone", "silent"])
def test_a_leaver_that_is_not_heard_between_boundary_and_decision_is_no_loss_until_all_limits_are_over(lost: str):
    """The next world redoes the batch without it, within its own limits."""
    deciding = view(**{lost: ("c",)}, last_step_at=at(-100), handoff=handoff(state=HandoffState.CUTTING_OVER))
    assert act(deciding).do is Do.NOTHING
    assert act(replace(deciding, last_step_at=at(-181))).do is Do.START
    assert act(replace(deciding, **{lost: ("b",)})).do is Do.START, "b is needed"
    assert act(replace(deciding, handoff=handoff(state=HandoffState.READY))).do is Do.START


def test_a_leavers_rank_that_dies_ends_the_job_only_if_the_others_say_that_they_are_broken():
    end = ProcessEnd(7, signal="SIGKILL", step=50)
    killed = RankError("rank 2 on node c is failed", str(end), "c", 2, 50, None, end)
    missed = RankError("rank 0 on node a is broken: it misses a peer", "it misses a peer", "a", 0, 50, FELT)
    died = FirstCause(FailedPart.RANK, "c", 2, signal="SIGKILL", step=50)
    at_once = view(errors=(killed,), error_at=at(-1))
    deciding = replace(
        at_once, handoff=handoff(state=HandoffState.CUTTING_OVER), error_at=at(-90), last_step_at=at(-91)
    )
    assert act(deciding).do is Do.NOTHING
    broken = act(replace(deciding, errors=(killed, missed)))
    assert (broken.do, broken.cause) == (Do.START, died)
    assert act(replace(deciding, last_step_at=at(-181))).do is Do.START
    for state in (HandoffState.PREPARING, HandoffState.READY):
        open_yet = replace(at_once, handoff=handoff(state=state))
        waits = act(open_yet)
        assert (waits.do, waits.look_again_s) == (Do.NOTHING, 0.3), "the boundary may be there, and not told yet"
        assert act(replace(open_yet, error_at=at(-5.1))).cause == died
        assert act(replace(open_yet, errors=(killed, missed))).cause == died
    assert act(at_once).do is Do.START
    assert act(replace(at_once, handoff=handoff(state=HandoffState.PROPOSED))).do is Do.START


@pytest.mark.parametrize("lost", ["silent", "gone"])
def test_an_agent_that_is_away_while_its_ranks_still_train_is_no_loss_and_is_watched(lost: str):
    action = act(view(**{lost: ("c",)}))
    assert (action.do, action.look_again_s) == (Do.NOTHING, 1.0)


@pytest.mark.parametrize("lost", ["silent", "gone"])
def test_how_long_no_step_may_come_follows_from_the_length_of_the_steps(lost: str):
    in_a_step = view(**{lost: ("c",)}, step_s=22.0, last_step_at=at(-100))
    assert act(in_a_step).do is Do.NOTHING
    assert act(replace(in_a_step, last_step_at=at(-111))).do is Do.START


@pytest.mark.parametrize(("lost", "after_s"), [("gone", 6), ("silent", 21)])
def test_a_running_job_of_which_no_step_was_seen_is_counted_from_when_it_began_to_run(lost: str, after_s: int):
    running = view(**{lost: ("a", "b", "c")}, last_step_at=None, state_changed_at=at(-after_s))
    assert act(running).do is Do.START
    assert act(replace(running, state_changed_at=at(2 - after_s))).do is Do.NOTHING


def test_steps_of_before_the_service_listened_again_may_not_have_been_heard_yet():
    silent = view(silent=("c",), last_step_at=at(-100), listening_since=at(-20))
    assert act(silent).do is Do.NOTHING
    again = act(replace(silent, listening_since=at(-20.1)))
    assert (again.do, again.reason.split(";")[0]) == (Do.START, "c is silent and no step was made for 100 s")
    assert act(replace(silent, last_step_at=at(-20), listening_since=at(-100))).do is Do.NOTHING
    assert act(replace(silent, last_step_at=at(-20.1), listening_since=at(-100))).do is Do.START


def test_the_reason_is_that_of_the_rank_that_failed_and_not_of_those_that_miss_it():
    survivor = RankError("rank 0 on node a is failed: it misses a peer", "it misses a peer", said=FELT)
    first = RankError("rank 1 on node c is failed: killed by SIGKILL", "killed by SIGKILL")
    for errors in ((survivor, first), (first, survivor)):
        action = act(view(errors=errors))
        assert action.reason.startswith("rank 1 on node c is failed: killed by SIGKILL; restart")
    alone = act(view(errors=(survivor,)))
    assert alone.reason.startswith(survivor.shown)


def test_while_ranks_only_miss_a_peer_the_agent_of_the_one_that_failed_has_a_moment_to_report_it():
    missed = RankError("rank 0 on node a is failed: it misses a peer", "it misses a peer", "a", 0, 50, FELT)
    waiting = view(errors=(missed,), error_at=at(-1))
    action = act(waiting)
    assert (action.do, action.look_again_s) == (Do.NOTHING, 0.3)
    end = ProcessEnd(7, signal="SIGKILL", step=50)
    killed = RankError("rank 2 on node c is failed", str(end), "c", 2, 50, None, end)
    known = act(replace(waiting, errors=(missed, killed)))
    assert known.do is Do.START
    assert known.cause == FirstCause(FailedPart.RANK, "c", 2, signal="SIGKILL", step=50)
    late = act(replace(waiting, error_at=at(-1.6)))
    assert (late.do, late.cause) == (Do.START, FirstCause(FailedPart.PEER, step=50))


@pytest.mark.parametrize("away", ["silent", "gone"])
def test_where_ranks_only_miss_a_peer_the_one_node_that_is_not_heard_is_the_cause(away: str):
    felt = tuple(
        RankError(f"rank {rank} on node {node} is failed", "it misses a peer", node, rank, 50, FELT)
        for rank, node in enumerate("ab")
    )
    cut = view(errors=felt, error_at=at(-9), **{away: ("c",)})
    action = act(cut)
    assert (action.do, action.cause) == (Do.START, FirstCause(FailedPart.NODE, "c", step=50))
    assert action.reason.startswith("c is not heard; rank 0 on node a is failed; restart")
    assert act(replace(cut, **{away: ("b", "c")})).cause == FirstCause(FailedPart.NODE, "c", step=50), "b complains"
    several = act(replace(cut, errors=felt[:1], **{away: ("b", "c")}))
    assert several.cause == FirstCause(FailedPart.PEER, step=50)
    assert several.reason.startswith("b, c are not heard; rank 0 on node a is failed; restart")
    released = handoff(state=HandoffState.CUTTING_OVER, may_lose_leavers=True)
    assert act(replace(cut, handoff=released)).cause == FirstCause(FailedPart.PEER, step=50), "nobody needs c"


def test_of_several_nodes_that_are_not_heard_the_one_whose_notice_ran_out_first_is_the_cause():
    felt = (RankError("rank 0 on node a is failed", "it misses a peer", "a", 0, 50, FELT),)
    leaving = (Leaving("c", at(-40), at(-4)), Leaving("b", at(-40), at(-6)))
    gone = view(errors=felt, error_at=at(-9), leaving=leaving, silent=("b", "c"))
    first = act(gone)
    assert first.cause == FirstCause(FailedPart.NODE, "b", step=50)
    assert first.reason.startswith("b is not heard; rank 0 on node a is failed; restart")
    assert act(replace(gone, silent=(), unheard=("b",))).cause == first.cause, "an overdue report will do"
    assert act(replace(gone, silent=(), unheard=())).cause == FirstCause(FailedPart.PEER, step=50), "both are heard"
    assert act(replace(gone, silent=(), unconfirmed=("b",))).cause == first.cause, "since then"
    later = (leaving[0], Leaving("b", at(-40), at(6)))
    assert act(replace(gone, leaving=later)).cause == FirstCause(FailedPart.NODE, "c", step=50)
    complains = RankError("rank 1 on node b is failed", "it misses a peer", "b", 1, 50, FELT)
    assert act(replace(gone, errors=(*felt, complains))).cause == FirstCause(FailedPart.NODE, "c", step=50)


def test_where_ranks_miss_a_peer_the_one_that_its_agent_saw_stopped_is_the_cause_and_never_the_last_to_report():
    felt = tuple(RankError(f"rank {rank} on node a is failed", "no peer", "a", rank, 50, FELT) for rank in (0, 1))
    stands = view(errors=felt, error_at=at(-9), stopped=(("b", 2),))
    action = act(stands)
    assert (action.do, action.cause) == (Do.START, FirstCause(FailedPart.RANK, "b", 2, step=50))
    assert action.reason.startswith("rank 2 on node b stands still; rank 0 on node a is failed; restart")
    for others in ((), (("b", 2), ("c", 3))):
        assert act(replace(stands, stopped=others)).cause == FirstCause(FailedPart.PEER, step=50)
    end = ProcessEnd(7, signal="SIGKILL")
    killed = RankError("rank 1 on node a is failed", str(end), "a", 1, 50, None, end)
    assert act(replace(stands, errors=(felt[0], killed))).cause == FirstCause(
        FailedPart.RANK, "a", 1, signal="SIGKILL", step=50
    )


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"gone": ("c",), "last_step_at": at(-30)}, FirstCause(FailedPart.NODE, "c", step=50)),
        ({"silent": ("c",), "last_step_at": at(-30)}, FirstCause(FailedPart.NODE, "c", step=50)),
        ({"state": JobState.STARTING, "state_changed_at": at(-271)}, FirstCause(FailedPart.START)),
        ({"broken": (Loss("x", FirstCause(FailedPart.STORE, "a")),)}, FirstCause(FailedPart.STORE, "a")),
    ],
)
def test_every_loss_has_its_cause_typed(changes, cause):
    assert act(view(**changes)).cause == cause


def test_a_lost_world_without_enough_nodes_suspends():
    lost = view(gone=("c",), last_step_at=at(-1 - GONE_PATIENCE_S), restart=NOTHING_FITS)
    action = act(lost)
    assert (action.do, action.reason) == (Do.SUSPEND, "c disappeared without a handoff; 1 nodes are ready")


def test_nodes_that_are_gone_may_come_back_with_their_ranks_while_nothing_could_start_without_them():
    lost = view(gone=("c",), last_step_at=at(1 - GONE_PATIENCE_S), restart=NOTHING_FITS)
    waits = act(lost)
    assert (waits.do, waits.look_again_s) == (Do.NOTHING, 1.0)
    assert waits.reason == "c disappeared without a handoff; they may come back: 1 nodes are ready"
    assert act(replace(lost, gone=())).do is Do.NOTHING, "it is heard again, and trains"
    assert act(view(gone=("c",), last_step_at=at(-30))).do is Do.START, "something could start"
    taken = replace(lost, leaving=(Leaving("c", at(-1), None),))
    assert act(taken).do is Do.SUSPEND, "it was announced to go"
    starting = replace(lost, state=JobState.STARTING, state_changed_at=at(-1 - GONE_PATIENCE_S))
    assert act(starting).do is Do.SUSPEND, "it never trained"


def test_nodes_that_are_only_silent_are_waited_for_where_nothing_could_start_without_them():
    waits = act(view(silent=("b", "c"), last_step_at=at(-21), restart=NOTHING_FITS))
    assert (waits.do, waits.look_again_s) == (Do.NOTHING, 1.0)
    assert waits.reason == "b, c are silent and no step was made for 21 s; they may come back: 1 nodes are ready"
    gone = view(silent=("b",), gone=("c",), last_step_at=at(-1 - GONE_PATIENCE_S), restart=NOTHING_FITS)
    assert act(gone).do is Do.SUSPEND
    broken = (RankError("rank 0 on node a is failed: x", "x", "a", 0, 50),)
    assert act(view(silent=("b", "c"), errors=broken, restart=NOTHING_FITS)).do is Do.SUSPEND


def test_a_loss_during_an_open_handoff_takes_the_checkpoint_rung():
    assert act(view(broken=(Loss("store lost after the boundary", None),), handoff=handoff())).do is Do.START


def test_a_generation_that_trains_but_was_not_told_of_yet_is_never_restarted():
    action = act(view(ahead=3, gone=("c",), leaving=(Leaving("c", at(-30), None),)))
    assert (action.do, action.reason) == (Do.NOTHING, "generation 3 trains, its handoff is not reported yet")


def test_a_world_in_which_all_ranks_train_is_adopted_once_its_lead_had_the_time_to_tell_of_it():
    for told, since, expected in [(-9, None, Do.NOTHING), (-10, None, Do.ADOPT_WORLD), (-90, -9, Do.NOTHING)]:
        listening_since = None if since is None else at(since)
        action = act(view(ahead=3, told_at=at(told), listening_since=listening_since, gone=("c",)))
        assert action.do is expected, (told, since)
    adopted = act(view(ahead=3, told_at=at(-10), paused_because=PAUSED))
    assert (adopted.do, adopted.generation) == (Do.ADOPT_WORLD, 3), "it is paused from there"


def test_what_only_others_say_of_a_next_world_is_believed_for_a_while_counted_from_when_one_could_hear_of_it():
    said = {"ahead": 3, "ahead_by_member": False, "gone": ("c",), "state_changed_at": at(-900)}
    for recent in ({"last_step_at": at(-119)}, {"last_step_at": at(-600), "listening_since": at(-119)}):
        assert act(view(**said, **recent)).do is Do.NOTHING
    for past in ({"last_step_at": at(-121)}, {"last_step_at": None, "listening_since": at(-600)}):
        assert act(view(**said, **past)).reason.startswith("c disappeared without a handoff")


def test_a_suspended_job_resumes_from_its_checkpoint_once_nodes_are_back():
    suspended = view(state=JobState.SUSPENDED, world=None, restart=NOTHING_FITS)
    assert act(suspended) == Action(Do.NOTHING, "waiting: 1 nodes are ready")
    action = act(replace(suspended, restart=START))
    assert (action.do, action.checkpoint, action.lost_steps) == (Do.START, Checkpoint("/c/40", 40), 10)


def test_a_start_that_makes_no_step_is_tried_again_and_the_third_is_the_last():
    starting = view(state=JobState.STARTING, state_changed_at=at(-271), last_step_at=None)
    again = act(starting)
    assert (again.do, again.failed_start) == (Do.START, True)
    end = act(replace(starting, failed_starts=2))
    assert (end.do, end.state) == (Do.SETTLE, JobState.FAILED)
    assert end.reason.startswith("3 starts in a row failed; the last one: the start made no step within 270 s")


@pytest.mark.parametrize(
    ("active", "parent", "generation", "started_here", "refusal"),
    [
        (1, 1, 2, {1}, None),
        (1, 1, 5, {1}, None),
        (1, 3, 4, {1}, None),
        (None, 1, 2, set(), "the job has no active generation"),
        (2, 1, 2, {1}, "generation 2 is already active"),
        (3, 1, 4, {1}, "its parent 1 was replaced by generation 3"),
        (3, 2, 4, {1, 3}, "its parent 2 was replaced by generation 3"),
        (1, 1, 3, {1, 2}, "the service has started generation 2 since then"),
    ],
)
def test_a_generation_that_agents_made_alone_is_taken_only_out_of_the_line_that_is_active(
    active, parent, generation, started_here, refusal
):
    found = accepts_active(active=active, parent=parent, generation=generation, started_here=frozenset(started_here))
    assert found == refusal


@pytest.mark.parametrize(
    ("parent", "generation", "recorded", "passed"),
    [
        (1, 2, {1: None, 3: 2}, True),
        (1, 2, {1: None, 4: 3}, True),
        (2, 3, {1: None, 4: 3}, True),
        (1, 3, {1: None, 2: 1, 4: 3}, False),
        (1, 2, {1: None, 3: 1}, False),
        (1, 2, {1: None, 100_001: 1}, False),
        (1, 2, {1: None}, False),
        (0, 1, {2: 1}, True),
        (1, 2, {3: None}, False),
    ],
)
def test_the_job_went_through_a_generation_if_a_later_handoff_began_there_or_behind_it(
    parent, generation, recorded, passed
):
    started_here = frozenset(number for number in recorded if number in (1, 100_001))
    found = went_through(parent=parent, generation=generation, recorded=recorded, started_here=started_here)
    assert found is passed


def test_growth_waits_until_every_member_and_every_target_has_been_heard_again():
    away = view(decision=MOVE, unheard=("b", "c", "x"))
    action = act(away)
    assert (action.do, action.look_again_s) == (Do.NOTHING, 0.5)
    assert action.reason == "about to move: a better layout; waits for news from b, c"
    to_d = replace(MOVE, target=Placement(layout=ParallelLayout(pp=2), members=(MEMBERS[0], Member("d", 0))))
    assert act(replace(away, decision=to_d, unheard=("d",))).do is Do.NOTHING
    assert act(replace(away, unheard=("x",))).do is Do.PROPOSE


def test_a_job_that_starts_over_for_want_of_a_checkpoint_says_how_many_steps_that_loses():
    suspended = view(state=JobState.SUSPENDED, world=None, checkpoint=None)
    assert act(suspended).reason == "from its beginning, 50 steps lost; start there"
    assert act(replace(suspended, last_step=0)).reason == "start there"


def test_a_suspended_job_says_why_while_it_waits_and_when_it_starts_again():
    lost = act(view(gone=("b", "c"), last_step_at=at(-1 - GONE_PATIENCE_S), restart=NOTHING_FITS))
    assert lost.suspended_because == "b, c disappeared without a handoff"
    noticed = act(view(leaving=(Leaving("c", at(-30), None),), decision=NOTHING_FITS))
    assert (noticed.do, noticed.suspended_because) == (Do.SUSPEND, "c will go")
    why = "suspended because " + lost.suspended_because
    suspended = view(state=JobState.SUSPENDED, world=None, suspended_because=lost.suspended_because)
    assert act(replace(suspended, state=JobState.SUSPENDING)).reason == why
    assert act(replace(suspended, restart=NOTHING_FITS)).reason == f"{why}; waiting: 1 nodes are ready"
    assert act(suspended).reason == f"{why}; from checkpoint of step 40, 10 steps lost; start there"
    assert act(replace(suspended, checkpoint=None)).reason == f"{why}; from its beginning, 50 steps lost; start there"
    long = act(view(broken=(Loss("x" * 100_000, None),), restart=NOTHING_FITS))
    assert len(long.suspended_because) == SUSPENDED_BECAUSE_CHARS_MAX


def test_a_restart_waits_for_news_from_the_nodes_it_would_take():
    broken = view(broken=(Loss("rank 1 is gone", None),), unheard=("b",))
    waits = act(broken)
    assert (waits.do, waits.look_again_s) == (Do.NOTHING, 0.5)
    assert waits.reason == "rank 1 is gone; a restart waits for news from b"
    assert act(replace(broken, unheard=("c",))).do is Do.START, "c is no part of it"
    assert act(replace(broken, unheard=())).do is Do.START


ELSEWHERE = replace(START, target=Placement(layout=ParallelLayout(dp=2), members=(Member("d", 0), Member("e", 0))))


def test_a_restart_elsewhere_waits_until_no_node_that_is_not_heard_can_hold_a_step_lease():
    """Nobody tells such a node that its world is replaced: a key was revoked, or the node is cut off."""
    lost = view(revoked=("b",), restart=ELSEWHERE, lost_sight_of=(("a", at(-30)), ("b", at(-13.9))))
    waits = act(lost)
    assert (waits.do, waits.look_again_s) == (Do.NOTHING, 0.5)
    assert waits.reason == "the key of b was revoked; a restart waits until the step leases of b are over"
    assert act(replace(lost, lost_sight_of=(("a", at(-30)), ("b", at(-14))))).do is Do.START
    assert act(replace(lost, lost_sight_of=())).do is Do.START, "who is heard learns of it at once"


def test_ranks_of_a_start_wait_as_long_as_a_world_that_is_heard_may_hold_a_lease_if_it_is_cut_off_now():
    lost = view(revoked=("b",), restart=ELSEWHERE, lost_sight_of=(("b", at(-30)),))
    assert (act(lost).do, act(lost).steps_after_s) == (Do.START, 14.0), "a and c are heard"
    unheard = tuple((name, at(-30)) for name in "abc")
    assert act(replace(lost, lost_sight_of=unheard)).steps_after_s == 0.0, "their leases are over"
    assert act(replace(lost, restart=START)).steps_after_s == 0.0, "a ends its older rank before it starts the next"
    broken = RankError("rank 1 on node b is broken", "it failed", node="b", rank=1)
    dead = replace(lost, revoked=(), errors=(broken,), error_at=at(-9))
    assert (act(dead).do, act(dead).steps_after_s) == (Do.START, 0.0), "a world without one of its ranks does not step"


def test_a_start_that_replaces_one_whose_ranks_wait_waits_as_long_for_the_same_older_world():
    broken = RankError("rank 1 on node b is broken", "it failed", node="b", rank=1)
    waiting = view(state=JobState.STARTING, steps_from_at=at(9), errors=(broken,), error_at=at(-5), restart=ELSEWHERE)
    again = act(waiting)
    assert (again.do, again.steps_after_s) == (Do.START, 9.0)
    assert "; ranks wait 9 s, since an older world that was heard may hold" in again.reason
    revoked = replace(waiting, errors=(), error_at=None, revoked=("b",))
    assert act(revoked).steps_after_s == 14.0, "the world that waited is heard too"
    suspended = replace(waiting, state=JobState.SUSPENDED, world=None, errors=(), error_at=None)
    assert act(suspended).steps_after_s == 9.0
    assert act(replace(waiting, steps_from_at=at(-1))).steps_after_s == 0.0
    shared = replace(waiting, steps_from_at=None, unstepped_since=at(-5))
    assert act(shared).steps_after_s == 9.0, (
        "it waited for nothing, since it was to end a rank of the older world first"
    )


def test_a_start_has_its_time_from_when_its_ranks_may_step():
    starting = view(state=JobState.STARTING, state_changed_at=at(-280), steps_from_at=at(-266))
    assert act(starting).do is Do.NOTHING
    assert act(replace(starting, steps_from_at=at(-271))).do is Do.START
    waits = act(replace(starting, state_changed_at=at(-4), steps_from_at=at(10)))
    assert waits.reason.startswith(
        "starting; ranks wait until 00:00:10 UTC, since an older world that was heard may hold step leases so long"
    )
    assert waits.look_again_s == 280.0


def test_what_an_older_world_was_heard_counts_from_the_end_of_an_outage_of_the_service():
    """Its agents gave it leases without the service meanwhile."""
    long_ago = tuple((name, at(-90)) for name in "abc")
    lost = view(revoked=("b",), restart=ELSEWHERE, lost_sight_of=long_ago, listening_since=at(-13))
    assert act(lost).reason.endswith("a restart waits until the step leases of a, b, c are over")
    assert act(replace(lost, listening_since=at(-14))).do is Do.START


def test_a_restart_waits_for_no_lease_of_a_world_that_has_lost_a_rank_or_gives_one_to_the_next():
    lost = view(revoked=("b",), restart=ELSEWHERE, lost_sight_of=(("b", at(-1)),))
    assert act(lost).do is Do.NOTHING
    broken = RankError("rank 1 on node b is broken", "it failed", node="b", rank=1)
    assert act(replace(lost, revoked=(), errors=(broken,), error_at=at(-9))).do is Do.START
    assert act(replace(lost, restart=START)).do is Do.START, "a starts its next rank only when the older one has ended"


def test_a_restart_waits_for_the_leases_of_the_world_that_an_open_handoff_may_have_led_to():
    handoff = OpenHandoff(uuid4(), HandoffState.CUTTING_OVER, ("a",), ("b", "x"), at(-9), at(-5), at(60))
    broken = RankError("rank 1 on node b is broken", "it failed", node="b", rank=1)
    lost = view(errors=(broken,), error_at=at(-9), restart=ELSEWHERE, handoff=handoff, lost_sight_of=(("x", at(-3)),))
    assert act(lost).reason.endswith("a restart waits until the step leases of x are over")
    to_b = Placement(layout=ParallelLayout(dp=2), members=(Member("b", 0), Member("d", 0)))
    assert act(replace(lost, restart=replace(START, target=to_b))).do is Do.START


@pytest.mark.parametrize(("times", "waits_s"), [(0, 60.0), (1, 4.0), (2, 8.0), (5, 64.0), (9, 960.0), (9_999, 960.0)])
def test_what_came_to_nothing_is_proposed_again_after_longer_and_longer(times: int, waits_s: float):
    past = Declined(TARGET, (), at(0), "it was not done in time", times)
    waiting = view(
        decision=MOVE, declined=past, last_handoff_at=at(0), now=at(waits_s - 1), last_step_at=at(waits_s - 1)
    )
    action = act(waiting)
    assert (action.do, action.look_again_s) == (Do.NOTHING, 1.0)
    assert action.reason == "it was not done in time; the same is not proposed again yet"
    assert act(replace(waiting, now=at(waits_s))).do is Do.PROPOSE
    other = replace(MOVE, target=Placement(layout=ParallelLayout(pp=2), members=MEMBERS[1:]))
    assert act(replace(waiting, decision=other)).do is Do.PROPOSE, "another target may fare better"
    noticed = replace(waiting, leaving=(Leaving("c", at(-9), at(waits_s + 60)),))
    assert act(noticed).do is Do.PROPOSE, "a notice does not wait for growth that failed"


NOTICED = (Leaving("c", at(0), None),)


@pytest.mark.parametrize(
    ("changes", "passed_s", "before", "after"),
    [
        ({"leaving": NOTICED, "decision": MOVE}, 2.9, Do.NOTHING, Do.PROPOSE),
        ({"decision": MOVE, "state_changed_at": at(0)}, 2.9, Do.NOTHING, Do.PROPOSE),
        ({"decision": MOVE, "last_handoff_at": at(0)}, 2.9, Do.NOTHING, Do.PROPOSE),
        ({"decision": MOVE, "last_handoff_at": at(-9), "state_changed_at": at(0)}, 2.9, Do.NOTHING, Do.PROPOSE),
        ({"state": JobState.STARTING, "state_changed_at": at(0)}, 270.0, Do.NOTHING, Do.START),
        ({"silent": ("c",), "last_step_at": at(0)}, 20.0, Do.NOTHING, Do.START),
        ({"gone": ("c",), "last_step_at": at(0)}, 5.0, Do.NOTHING, Do.START),
        ({"gone": ("c",), "last_step_at": at(0), "step_s": 4.0}, 20.0, Do.NOTHING, Do.START),
        ({"silent": ("c",), "last_step_at": at(0), "step_s": 6.0}, 30.0, Do.NOTHING, Do.START),
        ({"handoff": handoff(state=HandoffState.PROPOSED, opened_at=at(0))}, 15.0, Do.NOTHING, Do.DROP_HANDOFF),
        ({"handoff": handoff(changed_at=at(0))}, 240.0, Do.NOTHING, Do.DROP_HANDOFF),
        ({"state": JobState.STOPPING, "state_changed_at": at(0), "ranks_left": 1}, 60.0, Do.NOTHING, Do.SETTLE),
    ],
)
def test_what_is_due_after_a_while_is_not_due_a_tenth_of_a_second_before(changes, passed_s, before, after):
    still = {"last_step_at": at(passed_s - 1)} | changes
    assert act(view(**still, now=at(passed_s))).do is before
    assert act(view(**still, now=at(passed_s + 0.1))).do is after


def test_a_start_is_lost_when_its_time_is_over_whatever_steps_there_were_before():
    starting = view(state=JobState.STARTING, state_changed_at=at(-271), last_step_at=at(-1))
    assert act(starting).reason.startswith("the start made no step within 270 s")
    assert act(replace(starting, state_changed_at=at(-10), gone=("c",))).do is Do.START, "nobody shows that it steps"


@pytest.mark.parametrize(
    ("changes", "look_again_s"),
    [
        ({}, None),
        ({"gone": ("c",)}, 1.0),
        ({"ahead": 3}, 1.0),
        ({"handoff": handoff()}, 1.0),
        ({"state": JobState.STARTING, "state_changed_at": at(-9)}, 270.0),
        ({"broken": (Loss("x", None),)}, 270.0),
        ({"stop_requested": True}, 60.0),
        ({"state": JobState.STOPPING, "state_changed_at": at(-9), "ranks_left": 1}, 1.0),
        ({"decision": MOVE, "last_handoff_at": at(-1)}, 3.0),
        ({"decision": MOVE, "silent": ("c",)}, 3.0),
    ],
)
def test_what_may_change_by_time_alone_is_looked_at_again(changes, look_again_s):
    assert act(view(**changes)).look_again_s == look_again_s


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING, JobState.SUSPENDED])
def test_a_job_that_reached_its_end_is_finished_from_any_state_also_when_a_stop_was_asked_for(state):
    action = act(view(state=state, finished="step 1000 is done", stop_requested=True))
    assert (action.do, action.state, action.reason) == (Do.SETTLE, JobState.FINISHED, "step 1000 is done")
    assert act(view(state=JobState.STOPPING, finished="step 1000 is done")).state is JobState.STOPPED


def test_suspending_ends_suspended_and_a_pending_job_starts_at_its_beginning():
    assert act(view(state=JobState.SUSPENDING)).state is JobState.SUSPENDED
    first = act(view(state=JobState.PENDING, world=None, checkpoint=None, last_step=0))
    assert first == Action(Do.START, "start there", target=TARGET)
    again = act(view(state=JobState.SUSPENDED, world=None))
    assert again.reason == "from checkpoint of step 40, 10 steps lost; start there"
    ahead = act(view(state=JobState.SUSPENDED, world=None, checkpoint=Checkpoint("/c/60", 60)))
    assert ahead.lost_steps == 0, "the checkpoint is newer than the last step that was reported"


def test_a_proposal_to_nodes_that_are_away_is_dropped_before_it_is_opened():
    proposed = view(handoff=handoff(state=HandoffState.PROPOSED), absent=("d", "e"))
    assert act(proposed) == Action(Do.DROP_HANDOFF, "not opened yet, and no reports come from d, e")
    assert act(replace(proposed, handoff=handoff())).do is Do.NOTHING
    assert act(replace(proposed, absent=())).do is Do.NOTHING


def test_a_start_that_fails_counts_and_a_running_job_that_fails_does_not():
    failing = view(state=JobState.STARTING, state_changed_at=at(-9), broken=(Loss("x", None),))
    assert act(failing).failed_start and act(replace(failing, failed_starts=1)).do is Do.START
    assert act(replace(failing, failed_starts=2)).state is JobState.FAILED
    running = act(view(broken=(Loss("x", None),), failed_starts=9))
    assert (running.do, running.failed_start) == (Do.START, False)


def test_notices_come_before_growth():
    assert act(view(leaving=(Leaving("c", at(-30), None),), decision=MOVE)).leaving
    assert act(view(decision=replace(MOVE, verdict=PlannerVerdict.STAY))).do is Do.NOTHING, "no notice, no move"
    assert deadline_of((Leaving("c", at(0), None),)) is None


PAUSED = "anna asked for a pause"


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING])
@pytest.mark.parametrize(
    "more",
    [{}, {"handoff": handoff()}, {"leaving": (Leaving("c", NOW, None),)}, {"decision": MOVE}],
    ids=("quiet", "handoff", "notice", "growth"),
)
def test_a_job_whose_pause_was_asked_for_is_suspended_whatever_it_was_about_to_do(state, more):
    found = act(view(state=state, paused_because=PAUSED, **more))
    assert (found.do, found.reason, found.suspended_because) == (Do.SUSPEND, PAUSED, PAUSED)
    assert found.cause is None


def test_a_paused_job_whose_world_is_lost_is_not_started_again_and_the_cause_is_kept():
    found = act(view(paused_because=PAUSED, gone=("b",), last_step_at=at(-90)))
    assert found.do is Do.SUSPEND and found.reason.endswith(f"; not started again, since {PAUSED}")
    assert found.cause is not None and found.cause.node == "b" and found.suspended_because == PAUSED


def test_a_pause_waits_for_the_report_of_a_handoff_that_is_over():
    assert act(view(paused_because=PAUSED, ahead=3)).do is Do.NOTHING


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.SUSPENDED])
def test_a_paused_job_starts_only_once_it_is_resumed(state):
    paused = view(state=state, world=None, paused_because=PAUSED, suspended_because=PAUSED)
    assert act(paused).do is Do.NOTHING and f"paused because {PAUSED}" in act(paused).reason
    assert act(replace(paused, paused_because="")).do is Do.START


def test_a_stop_ends_a_paused_job_and_a_pause_that_is_under_way():
    assert act(view(state=JobState.SUSPENDED, paused_because=PAUSED, stop_requested=True)).state is JobState.STOPPED
    assert act(view(paused_because=PAUSED, stop_requested=True)).state is JobState.STOPPING
    ending = view(state=JobState.SUSPENDING, paused_because=PAUSED, suspended_because=PAUSED, ranks_left=0)
    assert (act(ending).state, act(ending).reason) == (JobState.SUSPENDED, f"suspended because {PAUSED}")


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.SUSPENDED])
def test_a_job_that_waits_is_not_started_while_it_is_paused_or_its_budget_is_spent(state):
    waiting = view(state=state, world=None, overspent="it has cost 41 of 40 USD")
    assert act(waiting) == Action(Do.NOTHING, "it has cost 41 of 40 USD; it goes on when budget_usd is raised")
    paused = act(replace(waiting, paused_because=PAUSED))
    assert paused == Action(Do.NOTHING, f"paused because {PAUSED}; waiting for somebody to resume it")
    assert act(replace(waiting, overspent="")).do is Do.START
    assert act(view(overspent=waiting.overspent)).suspended_because == waiting.overspent
