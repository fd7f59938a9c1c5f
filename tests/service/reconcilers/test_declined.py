"""A proposal that the agents do not open, with their reason."""

from uuid import UUID

from agent.protocol.sync import HandoffDeclined
from tests.service.reconcilers.conftest import Fleet


def declines(fleet: Fleet, handoff: dict, reason: str = "there is no room for both worlds") -> dict:
    fact = HandoffDeclined(handoff_id=UUID(handoff["handoff_id"]), job_id=fleet.job_id, reason=reason)
    return {"declined": (fact,)}


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
