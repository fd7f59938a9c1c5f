"""Starts whose nodes are taken, and starts of whose nodes a notice tells, through the reconciler and its database."""

import pytest

from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.handoff.generations import next_start
from service.jobs.tables import JobRow
from tests.service.fake_agent import MISSES_A_PEER
from tests.service.reconcilers.conftest import Fleet

STORE_LOST = Reason("the store does not answer", "start", 0, cause=FailureCause(FailedPart.STORE))


def start(fleet: Fleet) -> dict:
    """Four nodes, on which the job starts."""
    fleet.add("a", "b", "c", "d")
    fleet.submit()
    for _ in range(2):
        fleet.round(trains=False)
    job = fleet.job()
    assert (job["state"], job["active_generation"]) == ("starting", 1)
    return job


def failed_starts(fleet: Fleet) -> int:
    with fleet.context.sessions() as session:
        return session.get_one(JobRow, fleet.job_id).failed_starts


def rounds_until_another_start(fleet: Fleet, *, reason: Reason) -> None:
    """Until the next generation, or another state: the living ranks report `reason`, and none trains."""
    before = fleet.job()["active_generation"]
    for count in range(100):
        job = fleet.job()
        if job["active_generation"] != before or job["state"] != "starting":
            return
        parts = failing(fleet, reason) if count else {}
        fleet.round(seconds=2, trains=False, parts=parts)
    raise AssertionError(f"no other start within 200 s: {fleet.job()['reason']}")


def failing(fleet: Fleet, reason: Reason) -> dict[str, dict]:
    """What agents report whose ranks cannot go on, all of the world that their orders name."""
    found = {}
    for name, agent in fleet.agents.items():
        order = agent.orders.jobs[0] if agent.orders and agent.orders.jobs else None
        if order is not None and order.roster is not None and name in order.roster.node_ids():
            found[name] = {"ranks": (agent.rank(order, stage=RankStage.FAILED, step=0, reason=reason),)}
    return found


@pytest.mark.thorough
def test_a_job_whose_starts_lose_a_node_each_time_goes_on_and_counts_no_failure(fleet: Fleet):
    start(fleet)
    for number, reason in enumerate((MISSES_A_PEER, STORE_LOST, MISSES_A_PEER)):
        lost = fleet.job()["nodes"][-1]
        del fleet.agents[lost]
        fleet.add(f"n{number}")
        rounds_until_another_start(fleet, reason=reason)
        job = fleet.job()
        assert (job["state"], failed_starts(fleet)) == ("starting", 0), job["reason"]
        assert lost not in job["nodes"]
        assert job["generations"][-2]["ended_by"] is not None
    for _ in range(3):
        fleet.round()
    assert fleet.job()["state"] == "running"


def test_ranks_that_miss_a_peer_on_nodes_that_are_heard_fail_the_third_start_all_the_same(fleet: Fleet):
    start(fleet)
    for _ in range(3):
        rounds_until_another_start(fleet, reason=MISSES_A_PEER)
    job = fleet.job()
    assert job["state"] == "failed" and job["reason"].startswith("3 starts in a row failed"), job["reason"]


def test_a_notice_that_leaves_a_start_too_little_time_replaces_it_at_once(fleet: Fleet):
    start(fleet)
    notice = fleet.agents["b"].notice(deadline_s=30)
    fleet.round(trains=False, parts={"b": {"notices": (notice,)}})
    job = fleet.job()
    assert (job["state"], job["active_generation"], job["nodes"]) == ("starting", next_start(1), ["a", "c", "d"])
    assert job["reason"].startswith("b goes in 30 s, and a handoff of this start needs 5")
    assert (job["generations"][0]["ended_by"]["what"], job["generations"][0]["ended_by"]["node"]) == ("node", "b")
    assert (failed_starts(fleet), fleet.handoffs()) == (0, [])
    for _ in range(2):
        fleet.round()
    assert fleet.agents["a"].job_order().generation == next_start(1)
    assert fleet.job()["state"] == "running"


@pytest.mark.thorough
def test_a_start_with_time_enough_makes_its_step_and_is_then_handed_over_like_any_other(fleet: Fleet):
    start(fleet)
    notice = fleet.agents["b"].notice(deadline_s=120)
    fleet.round(trains=False, parts={"b": {"notices": (notice,)}})
    for _ in range(8):
        fleet.round(seconds=2.5, trains=False)
    job = fleet.job()
    assert (job["active_generation"], fleet.handoffs()) == (1, []), "no agent opens one before the first step"
    fleet.round()
    for _ in range(3):
        fleet.round(seconds=0.5)
    assert (fleet.job()["state"], fleet.handoffs()) == ("running", []), "the agents have their moment first"
    for _ in range(3):
        fleet.round()
    (handoff,) = fleet.handoffs()
    assert (handoff["state"], handoff["leaving"], handoff["parent"]) == ("proposed", ["b"], 1)


def test_starts_of_a_job_that_take_less_are_replaced_only_by_what_was_measured(fleet: Fleet):
    """The first one took some seconds, and the next one begins with nothing either."""
    fleet.run()
    fleet.jump(30)
    fleet.round()
    agent = fleet.agents["c"]
    failed = agent.rank(agent.job_order(), stage=RankStage.FAILED, step=31, reason=Reason("it failed", "training", 2))
    fleet.round(trains=False, parts={"c": {"ranks": (failed,)}})
    restart = fleet.job()
    assert (restart["state"], restart["active_generation"]) == ("starting", next_start(1))
    notice = fleet.agents["b"].notice(deadline_s=30)
    fleet.round(trains=False, parts={"b": {"notices": (notice,)}})
    assert fleet.job()["active_generation"] == next_start(1), "55 s would be guessed, had none been timed"


def test_a_start_that_cannot_go_on_without_a_node_waits_suspended_and_says_why(fleet: Fleet):
    fleet.add("a", "b")
    fleet.submit()
    for _ in range(2):
        fleet.round(trains=False)
    notice = fleet.agents["b"].notice(deadline_s=30)
    fleet.round(trains=False, parts={"b": {"notices": (notice,)}})
    assert fleet.job()["state"] == "suspending"
    for _ in range(3):
        fleet.round(trains=False)
    job = fleet.job()
    assert (job["state"], failed_starts(fleet)) == ("suspended", 0)
    assert job["reason"].startswith("suspended because b will go")
