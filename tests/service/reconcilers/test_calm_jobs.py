"""Jobs that nothing has changed are passed over, and only those."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from service.jobs.tables import JobRow
from service.reconcilers import jobs
from service.reconcilers.calm_jobs import (
    LONG_LOOK_S,
    LOOK_AGAIN_S,
    LOOK_AT_CALM_S,
    PASSED_MAX,
    REST,
    LongLooks,
)
from tests.service.reconcilers.conftest import Fleet


@pytest.fixture
def looks(monkeypatch) -> Callable[[Fleet], int]:
    """How many whole looks at the job the next half minute brings: its nodes report steps in time, and nobody else
    says anything."""
    seen: list[str] = []
    situation = jobs.situation

    def noted(session, job: JobRow, **named):
        seen.append(job.job_id)
        return situation(session, job, **named)

    monkeypatch.setattr(jobs, "situation", noted)

    def count(fleet: Fleet) -> int:
        for _ in range(int(LOOK_AT_CALM_S / 2) + 1):
            for agent in fleet.agents.values():
                agent.sync(**fleet.state_of(agent, trains=True))
            fleet.jump(max(fleet.steps.values()) + 1)
            fleet.clock.advance(2)
        before = len(seen)
        jobs.tick(fleet.context)
        return len(seen) - before

    return count


def settled(fleet: Fleet, **job) -> None:
    """A job that trains on four nodes, of which a look has found that nothing is to do."""
    fleet.add("a", "b", "c", "d")
    fleet.submit(**job)
    for _ in range(4):
        fleet.round()
    fleet.clock.advance(LOOK_AT_CALM_S)
    for agent in fleet.agents.values():
        agent.sync(**fleet.state_of(agent, trains=True))
    jobs.tick(fleet.context)
    assert fleet.job()["state"] == "running"


@pytest.mark.thorough
def test_a_job_at_its_full_size_that_nothing_changes_is_looked_at_once_in_three_times(fleet: Fleet, looks):
    settled(fleet)
    found = [looks(fleet) for _ in range(2 * (PASSED_MAX + 1))]
    assert sum(found) == 2, found
    assert found[: PASSED_MAX + 1] == found[PASSED_MAX + 1 :], found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"nodes": {"min": 2, "max": 5}}, id="it could grow"),
        pytest.param({"budget_usd": 1_000.0}, id="it has a budget", marks=pytest.mark.thorough),
        pytest.param({"deadline": "2026-06-01T00:00:00Z"}, id="it has a deadline", marks=pytest.mark.thorough),
        pytest.param({"policy": {}}, id="it has a policy", marks=pytest.mark.thorough),
    ],
)
def test_a_job_that_time_alone_may_change_is_looked_at_each_time(fleet: Fleet, looks, job):
    settled(fleet, **job)
    assert [looks(fleet) for _ in range(3)] == [1, 1, 1]


def test_whatever_changes_a_calm_job_has_it_looked_at_at_once(fleet: Fleet, looks):
    settled(fleet)
    assert looks(fleet) == 0
    agent = fleet.agents["b"]
    agent.sync(**fleet.state_of(agent, trains=True), notices=(agent.notice(),))
    jobs.tick(fleet.context)
    with fleet.context.sessions() as session:
        due_at = session.get_one(JobRow, fleet.job_id).due_at
    assert due_at is not None
    assert due_at <= fleet.clock() + timedelta(seconds=LOOK_AGAIN_S), "a job of which a node will go is not calm"


def test_a_job_rests_from_a_long_look_and_from_no_other():
    looks = LongLooks()
    assert looks.rest_s("job", 0.0) == 0.0
    looks.note("job", LONG_LOOK_S, 10.0)
    assert looks.rest_s("job", 10.0) == 0.0
    looks.note("job", 3 * LONG_LOOK_S, 10.0)
    assert looks.rest_s("job", 10.0) == pytest.approx(REST * 3 * LONG_LOOK_S)
    assert looks.rest_s("another", 10.0) == 0.0
    assert looks.rest_s("job", 10.0 + REST * 3 * LONG_LOOK_S) == 0.0
    looks.note("job", 60.0, 20.0)
    assert looks.rest_s("job", 20.0) == LOOK_AGAIN_S
    looks.note("job", LONG_LOOK_S / 2, 21.0)
    assert looks.rest_s("job", 21.0) == 0.0


def test_a_job_that_rests_is_looked_at_when_its_rest_is_over(fleet: Fleet, monkeypatch):
    settled(fleet)
    looks, now = LongLooks(), [100.0]
    looks.note(fleet.job()["job_id"], 0.5, now[0])
    monkeypatch.setattr(jobs, "_LONG", looks)
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    fleet.agents["a"].sync(notices=(fleet.agents["a"].notice(),))
    assert jobs.tick(fleet.context) == 0
    assert fleet.job()["state"] == "running"
    now[0] += 1.0
    fleet.clock.advance(1)
    assert jobs.tick(fleet.context) == 1
