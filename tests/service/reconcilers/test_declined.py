"""A proposal that the agents do not open, with their reason."""

from uuid import UUID

import pytest

from agent.protocol.sync import HandoffDeclined
from agent.protocol.values import HandoffCause, HandoffState
from liver_core.handoff import Reason
from tests.service.reconcilers.conftest import Fleet


def declines(fleet: Fleet, handoff: dict, reason: str = "there is no room for both worlds") -> dict:
    fact = HandoffDeclined(handoff_id=UUID(handoff["handoff_id"]), job_id=fleet.job_id, reason=reason)
    return {"declined": (fact,)}


@pytest.mark.thorough
def test_a_proposal_that_the_lead_declines_ends_at_once_and_is_not_made_again_while_nothing_changes(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(deadline_s=300),)}})
    for _ in range(4):
        fleet.round()
    (proposed,) = fleet.handoffs()
    assert proposed["state"] == "proposed"
    fleet.round(parts={"a": declines(fleet, proposed)})
    (ended,) = fleet.handoffs()
    assert ended["state"] == "aborted"
    assert ended["reason"] == "a does not open it: there is no room for both worlds"
    assert fleet.agents["c"].sync().jobs[0].handoff is None
    for _ in range(55):
        fleet.round()
    assert len(fleet.handoffs()) == 1, "the plan is the same, and so would be the answer"
    for _ in range(10):
        fleet.round()
    assert [item["state"] for item in fleet.handoffs()] == ["proposed", "aborted"], "a minute may have changed it"


def test_another_plan_is_proposed_at_once_after_one_was_declined(fleet: Fleet):
    fleet.run()
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(deadline_s=300),)}})
    for _ in range(4):
        fleet.round()
    fleet.round(parts={"a": declines(fleet, fleet.handoffs()[0])})
    fleet.round(parts={"d": {"notices": (fleet.agents["d"].notice(),)}})
    for _ in range(4):
        fleet.round()
    newest = fleet.handoffs()[0]
    assert (newest["state"], newest["leaving"]) == ("proposed", ["b", "d"])


def test_a_node_that_has_no_part_in_it_cannot_decline_and_an_opened_handoff_goes_on(fleet: Fleet):
    fleet.run()
    fleet.add("x", "y")
    fleet.round()
    fleet.round(parts={"b": {"notices": (fleet.agents["b"].notice(deadline_s=300),)}})
    for _ in range(4):
        fleet.round()
    (proposed,) = fleet.handoffs()
    assert proposed["target_nodes"] == ["a", "c", "d", "x"]
    (refusal,) = fleet.agents["y"].sync(**declines(fleet, proposed)).refusals
    reason = f"node y has no part in handoff {proposed['handoff_id']}"
    assert (refusal.part, refusal.reason) == ("declined", reason)
    assert fleet.handoffs()[0]["state"] == "proposed"
    fleet.hand_over(proposed)
    assert fleet.agents["a"].sync(**declines(fleet, proposed)).refusals == ()
    assert fleet.handoffs()[0]["state"] == "active"


def aborts_growth(fleet: Fleet, **more) -> None:
    """The agents open what is proposed, and it is not done in time."""
    fleet.round()
    (proposed,) = [each for each in fleet.handoffs() if each["state"] == "proposed"]
    reason = Reason("not finished 120 s after the boundary", "cutover")
    fleet.hand_over(proposed, state=HandoffState.ABORTED, cause=HandoffCause.GROW, leaving=(), reason=reason, **more)
    assert fleet.handoffs()[0]["state"] == "aborted"


def is_proposed(fleet: Fleet, *, within: int) -> bool:
    known = len(fleet.handoffs())
    for _ in range(within):
        fleet.round()
        if len(fleet.handoffs()) > known:
            return True
    return False


def grows(fleet: Fleet) -> None:
    """A job on two nodes, to which two more come."""
    fleet.add("a", "b")
    fleet.submit()
    for _ in range(4):
        fleet.round()
    fleet.add("c", "d")
    assert is_proposed(fleet, within=10)


@pytest.mark.thorough
def test_growth_that_is_aborted_again_and_again_is_proposed_after_longer_and_longer(fleet: Fleet):
    grows(fleet)
    for within in (8, 12):  # Once a rank may have died, and nothing stands in the way of the next try.
        aborts_growth(fleet)
        assert is_proposed(fleet, within=within)
    for wait_s in (16.0, 32.0, 64.0):
        aborts_growth(fleet)
        fleet.clock.advance(wait_s - 6.0)
        assert not is_proposed(fleet, within=4), wait_s
        assert is_proposed(fleet, within=6), wait_s


@pytest.mark.thorough
def test_growth_that_another_handoff_pushed_out_is_proposed_again_at_once(fleet: Fleet):
    grows(fleet)
    aborts_growth(fleet, superseded=True)
    assert is_proposed(fleet, within=6)
