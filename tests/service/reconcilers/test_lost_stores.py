"""What a world ended with that lost its store."""

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
