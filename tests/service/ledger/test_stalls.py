"""What is booked and shown while a job that runs makes no step."""

from typing import Any

import pytest

from agent.protocol.rank_status import RankStatus, Whereabouts
from service.jobs.tables import JobState
from service.reconcilers import jobs

EVERY_S = 60
READS = Whereabouts(at="samples (my_job.py:33)")
WAITS = Whereabouts(at="all_reduce (distributed_c10d.py:2810)", waits=True)


@pytest.fixture
def stands(client, context, training, clock):
    """Lets the job stand for some seconds, with all agents heard; `said`: where their ranks are, by node."""
    agents, parts = training

    def stand(seconds: int, said: dict[str, Whereabouts], step: int = 4) -> None:
        for _ in range(seconds // EVERY_S):
            clock.advance(EVERY_S)
            for name, agent in agents.items():
                rank: RankStatus = parts(name, step)["ranks"][0]
                agent.sync(ranks=(rank.model_copy(update={"whereabouts": said.get(name)}),))
            jobs.tick(context)

    return stand


def seconds_by_cause(client) -> dict[str, float]:
    found = client.get("/api/v1/ledger").json()["causes"]
    return {item["cause"]: round(item["slot_seconds"]) for item in found}


def the_job(client) -> dict[str, Any]:
    [job] = client.get("/api/v1/jobs").json()
    return client.get(f"/api/v1/jobs/{job['job_id']}").json() | {"listed": job}


def test_time_without_a_step_is_stalled_from_the_last_one_on_and_is_said(client, context, training, stands, clock):
    agents, parts = training
    before = seconds_by_cause(client)["productive"]
    stands(180, {"a": WAITS, "b": READS, "c": WAITS, "d": WAITS})
    job, spent = the_job(client), seconds_by_cause(client)
    assert spent["stalled"] == pytest.approx(4 * 180, abs=20) and spent["productive"] <= before
    assert job["state"] == "running" and job["pace"] == {"steps_per_s": None, "remaining_s": None}
    assert job["standstill"] == job["listed"]["standstill"]
    assert job["standstill"]["because"] == "rank 1 on b stands in samples (my_job.py:33)"
    for name in agents:
        clock.advance(0.1)
        agents[name].sync(**parts(name, 6))
    clock.advance(3)
    jobs.tick(context)
    job, after = the_job(client), seconds_by_cause(client)
    assert job["standstill"] is None and job["pace"]["steps_per_s"]
    assert after["stalled"] == spent["stalled"] and after["productive"] >= spent["productive"]


def test_a_hook_is_productive_and_named(client, stands):
    stands(120, {"a": Whereabouts(hook="validate", hook_s=110.0)})
    found = the_job(client)["standstill"]
    assert (found["hook"], found["because"]) == ("validate", "rank 0 on a runs validate")
    assert "stalled" not in seconds_by_cause(client)


def test_a_hung_world_is_started_again_and_names_the_rank(client, stands):
    said = {"a": WAITS, "b": READS, "c": WAITS, "d": WAITS}
    stands(1_140, said)
    assert the_job(client)["active_generation"] == 1
    stands(60, said)
    job = the_job(client)
    assert job["state"] == JobState.STARTING and job["active_generation"] > 1
    [ended] = [item for item in job["generations"] if item["generation"] == 1]
    assert (ended["ended_by"]["what"], ended["ended_by"]["node"], ended["ended_by"]["rank"]) == ("rank", "b", 1)
    assert "no step was made for 20 min after step 4" in job["reason"] and job["standstill"] is None
    [kept] = client.get(f"/api/v1/jobs/{job['job_id']}/incidents").json()
    assert (kept["kind"], kept["node_id"], kept["rank"], kept["step"]) == ("hang", "b", 1, 4) and kept["over_at"]
