"""Which node a world names that lost its store, or that its agents ended."""

from agent.protocol.sync import StoreHosted
from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from tests.service.reconcilers.conftest import Fleet


def test_a_world_that_lost_its_store_names_the_node_that_kept_it(fleet: Fleet):
    """A rank cannot tell: it knows an address."""
    fleet.run()
    fleet.round(parts={"a": {"stores": (StoreHosted(job_id=fleet.job_id, generation=1, host="10.0.0.1", port=29500),)}})
    gone = Reason("the store is gone at bring_up", "bring_up", 0, cause=FailureCause(FailedPart.STORE))
    rank = fleet.agents["d"].rank(fleet.agents["d"].job_order(), stage=RankStage.FAILED, step=4, reason=gone)
    fleet.round(trains=False, parts={"d": {"ranks": (rank,)}})
    ended_by = fleet.job()["generations"][0]["ended_by"]
    assert (ended_by["what"], ended_by["node"]) == ("store", "a")


def test_a_world_that_agents_ended_while_the_service_was_away_names_the_node_that_goes(fleet: Fleet):
    """Not a rank: none of them has failed."""
    fleet.run()
    why = "d will go, and nothing fits; the service is not heard"
    ends = {
        "stage": RankStage.FAILED,
        "step": 4,
        "reason": Reason(why, "suspend", node="d", cause=FailureCause(FailedPart.NODE)),
    }
    fleet.round(
        trains=False,
        parts={name: {"ranks": (agent.rank(agent.job_order(), **ends),)} for name, agent in fleet.agents.items()},
    )
    job = fleet.job()
    ended_by = job["generations"][0]["ended_by"]
    assert (ended_by["what"], ended_by["node"]) == ("node", "d")
    assert why in job["reason"] and "failed" not in job["reason"]
