"""A rank that is stopped for longer than others wait: its agent says so, and it is named where they miss a peer."""

from agent.protocol.process_end import STOPPED
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage, Reason
from liver_core.layout import ParallelLayout
from tests.service.fake_agent import MISSES_A_PEER, mirror, roster
from tests.service.reconcilers.conftest import Fleet

IS_STOPPED = Reason("its process has been stopped for 20 s, by a signal or a debugger", STOPPED, 2)


def test_of_several_ranks_that_have_not_failed_the_one_that_is_stopped_is_the_cause(fleet: Fleet) -> None:
    fleet.run()
    agents = fleet.agents
    lost = agents["a"].rank(agents["a"].job_order(), stage=RankStage.FAILED, step=4, reason=MISSES_A_PEER)
    stopped = agents["c"].rank(agents["c"].job_order(), step=4, reason=IS_STOPPED)
    parts = {"a": {"ranks": (lost,)}, "c": {"ranks": (stopped,)}}
    for node in "bd":
        parts[node] = {"ranks": (agents[node].rank(agents[node].job_order(), step=4),)}
    for seconds in (1.0, 0.6, 0.1):
        fleet.round(seconds=seconds, trains=False, parts=parts)
    job = fleet.job()
    cause = job["generations"][0]["ended_by"]
    assert (cause["what"], cause["node"], cause["rank"]) == ("rank", "c", 2)
    assert job["reason"].startswith("rank 2 on node c stands still; rank 0 on node a is failed")


def test_an_attempt_for_which_a_rank_was_missed_names_the_one_that_is_stopped(running, client, clock) -> None:
    job_id, agent, other = running
    order = agent.job_order()
    other.sync(ranks=(other.rank(other.job_order(), step=7, reason=IS_STOPPED),))
    aborted = mirror(
        order.roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock(),
        state=HandoffState.ABORTED, reason=MISSES_A_PEER,
    )  # fmt: skip
    agent.sync(ranks=(agent.rank(order, step=7),), handoffs=(aborted,))
    cause = client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()["ended_by"]
    assert (cause["what"], cause["node"]) == ("rank", "b")
