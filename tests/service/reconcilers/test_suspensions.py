"""A suspension that can wait, through the reconciler, its database, and the orders that agents get."""

from datetime import datetime, timedelta

import pytest

from liver_core.handoff.suspending import COMMITTED_S
from service.jobs.tables import JobRow
from tests.service.reconcilers.conftest import Fleet


def planned(fleet: Fleet) -> dict:
    """Two of three nodes will go in two minutes, and the job needs two."""
    fleet.add("a", "b", "c")
    fleet.submit()
    for _ in range(4):
        fleet.round()
    saved = fleet.checkpoint(fleet.step).model_copy(update={"seconds": 1.0})
    fleet.round(parts={"a": {"checkpoints": (saved,)}})
    leaving = {name: {"notices": (fleet.agents[name].notice(),)} for name in "bc"}
    fleet.round(parts=leaving)
    fleet.round()
    job = fleet.job()
    assert (job["state"], job["suspends_at"] is not None) == ("running", True), job["reason"]
    return job


def end_of(fleet: Fleet) -> datetime:
    """When the ranks will end."""
    with fleet.context.sessions() as session:
        found = session.get_one(JobRow, fleet.job_id).suspends_at
    assert found is not None
    return found


@pytest.mark.thorough
def test_agents_are_told_when_ranks_end_and_the_job_trains_until_then(fleet: Fleet):
    planned(fleet)
    order, ends_at = fleet.agents["a"].job_order(), end_of(fleet)
    assert (order.desired, order.suspends_utc, order.saves_at_end) == ("run", ends_at, True)
    assert order.checkpoint_asked == 1, "should a node go before its time"
    before = fleet.step
    while fleet.clock() < ends_at - timedelta(seconds=2):
        fleet.round()
    assert fleet.job()["state"] == "running" and fleet.job()["last_step"] > before + 60
    for _ in range(6):
        fleet.round(trains=False)
    job = fleet.job()
    assert job["state"] == "suspended" and job["suspends_at"] is None
    assert job["reason"].startswith("suspended because b, c will go; waiting: ")


def test_a_node_that_comes_in_time_calls_it_off_and_the_job_is_handed_over(fleet: Fleet):
    planned(fleet)
    fleet.add("d", "e")
    for _ in range(6):
        fleet.round()
    job, order = fleet.job(), fleet.agents["a"].job_order()
    assert (job["state"], job["suspends_at"], order.suspends_utc, order.saves_at_end) == ("running", None, None, False)
    (handoff,) = fleet.handoffs()
    assert (handoff["state"], handoff["leaving"]) == ("proposed", ["b", "c"])
    fleet.hand_over(handoff)
    assert fleet.job()["active_generation"] == 2


@pytest.mark.thorough
def test_ranks_that_ended_while_the_service_could_not_be_heard_are_found_suspended_and_start_again(fleet: Fleet):
    planned(fleet)
    last = fleet.job()["last_step"]
    ends_at = end_of(fleet)
    fleet.clock.now = ends_at + timedelta(seconds=COMMITTED_S)
    for gone in "bc":
        del fleet.agents[gone]
    saved = fleet.checkpoint(last).model_copy(update={"seconds": 1.0})
    fleet.round(trains=False, parts={"a": {"ranks": (), "checkpoints": (saved,)}})
    for _ in range(60):
        fleet.round(trains=False, parts={"a": {"ranks": ()}})
        if fleet.job()["state"] == "suspended":
            break
    job = fleet.job()
    assert (job["state"], job["lost_steps"]) == ("suspended", 0), job["reason"]
    fleet.add("d", "e")
    for _ in range(4):
        fleet.round()
    job = fleet.job()
    assert (job["state"], job["lost_steps"]) == ("running", 0)
    assert job["generations"][-1]["checkpoint_step"] == last
