"""A suspension that can wait: for how long, what calls it off, and who is believed about it. The rule on its own."""

from dataclasses import replace

import pytest

from agent.protocol.values import HandoffState
from liver_core.handoff.suspending import COMMITTED_S, SAVE_GUESS_S, TAKES_S
from service.jobs.tables import JobState
from service.jobs.view import Checkpoint, Do, JobView, Leaving
from tests.service.jobs.test_rules import MOVE, NOTHING_FITS, STAY, act, at, handoff, view

NEEDS_S = TAKES_S + 3 * 0.5 + 2 * 2.0


def noticed(**changes) -> JobView:
    """A notice of two minutes, which leaves too few nodes."""
    values = {
        "leaving": (Leaving("c", at(-1), at(120)),),
        "decision": NOTHING_FITS,
        "step_s": 0.5,
        "saves_at_end": True,
        "checkpoint": Checkpoint("/c/40", 40, at(-20), 2.0),
    }
    return view(**(values | changes))


def test_a_job_trains_on_until_its_suspension_has_to_begin_and_saves_at_once_all_the_same():
    first = act(noticed())
    begins = at(120 - NEEDS_S)
    assert (first.do, first.suspends_at, first.save) == (Do.SUSPEND_LATER, begins, True)
    assert first.reason == f"c will go; 1 nodes are ready: suspended at {begins:%H:%M:%S} UTC unless a node comes"
    waiting = noticed(suspends_at=begins, saves_soon=True)
    again = act(waiting)
    assert (again.do, again.look_again_s) == (Do.NOTHING, 120 - NEEDS_S)
    last = act(replace(waiting, now=begins))
    assert (last.do, last.reason, last.suspended_because) == (Do.SUSPEND, "c will go; 1 nodes are ready", "c will go")


@pytest.mark.parametrize(
    "changes",
    [
        {"leaving": (Leaving("c", at(-1), at(NEEDS_S)),)},
        {"leaving": (Leaving("b", at(-1), at(120)), Leaving("c", at(-1), None))},
        {"step_s": 0.0},
        {"saves_at_end": False},
        {"leaving": (Leaving("c", at(-1), at(TAKES_S + 2 * SAVE_GUESS_S)),), "checkpoint": Checkpoint("/c/40", 40)},
    ],
    ids=["no time", "one of them at any time", "no step was timed", "nothing to save to", "no checkpoint was timed"],
)
def test_it_is_suspended_at_once_where_waiting_may_lose_steps(changes):
    assert act(noticed(**changes)).do is Do.SUSPEND


def test_agents_are_told_of_a_nearer_end():
    nearer = act(noticed(suspends_at=at(100), leaving=(Leaving("c", at(-1), at(60)),)))
    assert (nearer.do, nearer.suspends_at) == (Do.SUSPEND_LATER, at(60 - NEEDS_S))


@pytest.mark.parametrize(
    "changes",
    [{"decision": MOVE}, {"leaving": (), "decision": STAY}, {"handoff": handoff()}],
    ids=["a node came", "the notice was withdrawn", "the agents hand over"],
)
def test_it_is_called_off_while_every_agent_can_hear_of_that_and_goes_on_otherwise(changes):
    planned = noticed(**({"suspends_at": at(COMMITTED_S + 0.1)} | changes))
    off = act(planned)
    assert (off.do, off.suspends_at) == (Do.SUSPEND_LATER, None)
    for away in ("silent", "gone", "unheard"):
        found = act(replace(planned, **{away: ("b",)}, last_step_at=at(0)))
        assert found.do is not Do.SUSPEND_LATER, away
    if "handoff" in changes:
        assert act(replace(planned, now=at(1))).do is Do.NOTHING, "the agents leave a handoff alone"
        assert act(replace(planned, now=at(9))).do is not Do.SUSPEND
        proposed = replace(planned, handoff=handoff(state=HandoffState.PROPOSED), now=at(9))
        assert act(proposed).do is Do.SUSPEND
    else:
        soon = act(replace(planned, now=at(1)))
        assert (soon.do, soon.look_again_s) == (Do.NOTHING, pytest.approx(COMMITTED_S - 0.9))
        assert act(replace(planned, now=at(COMMITTED_S + 0.1))).do is Do.SUSPEND


def test_ranks_that_ended_at_the_time_while_the_service_was_away_are_a_suspension_and_no_loss():
    """The node of the notice may be gone meanwhile, and nothing is known of it any more."""
    back = noticed(suspends_at=at(-60), leaving=(), decision=STAY, gone=("c",), last_step_at=at(-60))
    found = act(back)
    assert (found.do, found.cause) == (Do.SUSPEND, None)
    assert found.suspended_because == f"suspended at {at(-60):%H:%M:%S} UTC as was planned"


def test_a_world_that_breaks_before_its_suspension_starts_again_like_any_other():
    broken = noticed(suspends_at=at(60), gone=("b",), last_step_at=at(-30))
    assert act(broken).do is Do.START
    assert act(noticed(suspends_at=at(60), stop_requested=True)).state is JobState.STOPPING
