"""Jobs of a database that was restored from a backup, and does not know what happened since."""

from liver_core.handoff import FailedPart, FailureCause, RankStage, Reason
from liver_core.handoff.generations import next_start
from tests.service.reconcilers.conftest import Fleet


def test_a_start_below_one_that_a_restored_database_does_not_know_fails_at_once_and_the_next_one_is_above(fleet: Fleet):
    fleet.run()
    agent, newer = fleet.agents["a"], next_start(next_start(next_start(next_start(1))))
    broken = agent.rank(agent.job_order(), stage=RankStage.FAILED, step=9, reason=Reason("it failed", "training"))
    fleet.round(parts={"a": {"ranks": (broken,), "steps": ()}})
    fleet.round(trains=False)
    assert agent.job_order().generation == next_start(1)
    why = Reason("a newer one writes there", "training", 0, cause=FailureCause(FailedPart.START, newer_start=newer))
    refused = agent.rank(agent.job_order(), stage=RankStage.FAILED, reason=why)
    fleet.round(trains=False, parts={"a": {"ranks": (refused,)}})
    fleet.round(trains=False)
    assert agent.job_order().generation == next_start(newer)
    job = fleet.job()
    assert job["state"] == "starting" and "a newer one writes there" in job["reason"]
    assert job["generations"][-2]["ended_by"]["what"] == "start"
