"""The store that was lost is named by its node, whoever tells that it is gone: a rank only knows an address."""

from agent.protocol.sync import StoreHosted
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage
from liver_core.layout import ParallelLayout
from tests.service.fake_agent import MISSES_A_PEER, mirror, roster
from tests.service.sync.test_sync import LOST_STORE


def test_an_attempt_for_which_a_rank_lost_the_store_names_the_node_of_that_world_s_store(running, client, clock):
    job_id, agent, other = running
    agent.sync(stores=(StoreHosted(job_id=job_id, generation=1, host="10.0.0.1", port=29500),))
    lost = other.rank(other.job_order(), stage=RankStage.FAILED, step=7, reason=LOST_STORE)
    other.sync(ranks=(lost,))
    aborted = mirror(
        agent.job_order().roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock(),
        state=HandoffState.ABORTED, reason=MISSES_A_PEER,
    )  # fmt: skip
    agent.sync(handoffs=(aborted.model_copy(update={"store_node": "b"}),))
    cause = client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()["ended_by"]
    assert (cause["what"], cause["node"]) == ("store", "a")


def test_a_rank_that_reports_the_loss_of_the_store_just_afterwards_names_its_node_too(running, client, clock):
    job_id, agent, other = running
    agent.sync(stores=(StoreHosted(job_id=job_id, generation=1, host="10.0.0.1", port=29500),))
    aborted = mirror(
        agent.job_order().roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock(),
        state=HandoffState.ABORTED, reason=MISSES_A_PEER,
    )  # fmt: skip
    agent.sync(handoffs=(aborted,))
    other.sync(ranks=(other.rank(other.job_order(), stage=RankStage.FAILED, step=7, reason=LOST_STORE),))
    cause = client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()["ended_by"]
    assert (cause["what"], cause["node"]) == ("store", "a")


def test_the_store_of_a_start_is_where_the_start_says_whatever_another_node_reports(running):
    """Two agents that each take it for their turn have two stores: half of the ranks would wait in either."""
    job_id, agent, other = running
    assert (agent.job_order().store_node, other.job_order().store_node) == ("a", "a"), "told with the start"
    second = StoreHosted(job_id=job_id, generation=1, host="10.0.0.2", port=29500)
    (refusal,) = other.sync(stores=(second,)).refusals
    assert (refusal.part, refusal.reason) == ("stores", "the store of generation 1 is on a")
    assert agent.sync().jobs[0].store is None
    agent.sync(stores=(StoreHosted(job_id=job_id, generation=1, host="10.0.0.1", port=29500),))
    other.sync(stores=(second,))
    order = agent.sync().jobs[0]
    assert (order.store_node, order.store.host) == ("a", "10.0.0.1")
