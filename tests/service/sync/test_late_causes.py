"""What ended an attempt, where the agent that knows of it was away until the attempt was over."""

from uuid import uuid4

import pytest

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage, Reason
from liver_core.layout import ParallelLayout
from tests.service.fake_agent import MISSES_A_PEER, mirror, roster


@pytest.mark.parametrize("ends, what", [(True, "rank"), (False, "peer")])
def test_an_end_that_is_reported_late_is_the_cause_of_an_attempt_if_its_world_ended_with_it(
    running, client, clock, ends, what
):
    """An attempt that a world outlived failed of something else."""
    job_id, agent, other = running
    aborted = mirror(
        agent.job_order().roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b"), clock(),
        state=HandoffState.ABORTED, reason=MISSES_A_PEER,
    )  # fmt: skip
    failed = agent.rank(agent.job_order(), stage=RankStage.FAILED, step=7, reason=MISSES_A_PEER)
    agent.sync(handoffs=(aborted,), ranks=(failed,) if ends else ())
    clock.advance(5)
    other.sync(ranks=(other.dead(other.job_order(), ProcessEnd(7, signal="SIGKILL", step=7), step=7),))
    assert client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()["ended_by"]["what"] == what


def test_an_attempt_that_one_agent_gave_up_and_another_opened_again_is_as_the_later_number_tells(
    running, client, clock
):
    """The agent that opened it first went down, and tells at last that it had aborted it."""
    job_id, agent, other = running
    source, handoff_id = agent.job_order().roster, uuid4()

    def say(by, generation: int, state: HandoffState, mirror_seq: int, reason: Reason | None = None) -> None:
        target = roster(job_id, generation, ParallelLayout(pp=2), "a", "b")
        said = mirror(source, target, clock(), handoff_id=handoff_id, state=state, mirror_seq=mirror_seq, reason=reason)
        assert by.sync(handoffs=(said,)).refusals == ()

    def shown() -> tuple:
        row = client.get(f"/api/v1/handoffs/{handoff_id}").json()
        return row["state"], row["generation"], row["reason"], row["ended_by"] is not None

    say(agent, 2, HandoffState.ABORTED, 30, MISSES_A_PEER)
    aborted = shown()
    assert aborted[:2] == ("aborted", 2) and aborted[3]
    say(other, 3, HandoffState.PREPARING, 0)
    assert shown() == ("preparing", 3, "", False)
    say(agent, 2, HandoffState.ABORTED, 31, MISSES_A_PEER)
    say(other, 3, HandoffState.READY, 1)
    assert shown() == ("ready", 3, "", False)
    say(other, 3, HandoffState.ACTIVE, 2)
    assert client.get(f"/api/v1/jobs/{job_id}").json()["active_generation"] == 3


def test_an_attempt_keeps_its_end_where_an_opening_of_it_is_refused(running, client, clock):
    """Its number belongs to another handoff, which has gone through."""
    job_id, agent, other = running
    source, target = agent.job_order().roster, roster(job_id, 2, ParallelLayout(pp=2), "a", "b")
    agent.sync(handoffs=(mirror(source, target, clock()),))
    aborted = mirror(source, target, clock(), state=HandoffState.ABORTED, reason=MISSES_A_PEER, mirror_seq=3)
    assert other.sync(handoffs=(aborted,)).refusals == ()
    before = client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json()
    assert before["ended_by"] is not None
    opened = mirror(source, target, clock(), handoff_id=aborted.handoff_id, state=HandoffState.PREPARING, mirror_seq=4)
    assert [refusal.part for refusal in other.sync(handoffs=(opened,)).refusals] == ["handoffs"]
    assert client.get(f"/api/v1/handoffs/{aborted.handoff_id}").json() == before
