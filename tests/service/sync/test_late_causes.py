"""What ended an attempt, where the agent that knows of it was away until the attempt was over."""

import pytest

from agent.protocol.process_end import ProcessEnd
from agent.protocol.values import HandoffState
from liver_core.handoff import RankStage
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
