"""The numbers of a job: stored once for each step, the newer generation's before the older one's, and read in parts."""

from typing import Any

import pytest

from agent.protocol.sync import METRICS_PER_REPORT_MAX, MetricsRow
from service.jobs.tables import JobRow
from service.metrics import tables
from service.metrics.operations import store_metrics
from service.reconcilers import upkeep


def row(job_id: str, clock, step: int, generation: int = 1, **values: Any) -> MetricsRow:
    return MetricsRow(job_id=job_id, generation=generation, step=step, at_utc=clock(), values=values or {"loss": 0.5})


def own(value: float) -> dict[str, Any]:
    return {"own/score": float(value)}


@pytest.fixture
def curve(running, client, clock):
    """100 steps of a job; every tenth has a number of its own too."""
    job_id, agent, _ = running
    rows = [row(job_id, clock, step, loss=1 / step, **(own(step) if step % 10 == 0 else {})) for step in range(1, 101)]
    assert agent.sync(metrics=tuple(rows)).refusals == ()
    return f"/api/v1/jobs/{job_id}/metrics"


def steps(answer) -> list[int]:
    assert answer.status_code == 200, answer.text
    return [item["step"] for item in answer.json()]


def test_numbers_are_stored_once_and_nan_is_null(running, client, clock):
    job_id, agent, _ = running
    said = [row(job_id, clock, 1, loss=0.5, learning_rate=1e-3), row(job_id, clock, 2, loss=None, **own(7.0))]
    agent.sync(metrics=tuple(said))
    agent.sync(metrics=tuple(said))
    found = client.get(f"/api/v1/jobs/{job_id}/metrics").json()
    assert [(item["step"], item["generation"], item["values"]) for item in found] == [
        (1, 1, {"loss": 0.5, "learning_rate": 1e-3}),
        (2, 1, {"loss": None, "own/score": 7.0}),
    ]


def test_a_step_that_is_made_again_has_the_numbers_of_the_newer_generation(running, client, context, clock):
    job_id, agent, _ = running
    agent.sync(metrics=tuple(row(job_id, clock, step, loss=1.0, old=1.0) for step in (1, 2, 3)))
    again = [row(job_id, clock, step, generation, loss=2.0) for step in (2, 3) for generation in (100_001, 100_002)]
    late = [row(job_id, clock, step, loss=3.0) for step in (1, 2, 3)]
    with context.sessions.begin() as session:
        store_metrics(session, again)
        store_metrics(session, late)
    found = client.get(f"/api/v1/jobs/{job_id}/metrics").json()
    assert [(item["step"], item["generation"], item["values"]) for item in found] == [
        (1, 1, {"loss": 1.0, "old": 1.0}),
        (2, 100_002, {"loss": 2.0}),
        (3, 100_002, {"loss": 2.0}),
    ]


def test_a_range_of_steps_and_some_names_can_be_read_page_by_page(curve, client):
    assert steps(client.get(curve, params={"after": 90, "until": 95})) == [91, 92, 93, 94, 95]
    named = client.get(curve, params={"name": "own/score", "limit": 4})
    assert steps(named) == [10, 20, 30, 40]
    assert {tuple(item["values"]) for item in named.json()} == {("own/score",)}
    assert steps(client.get(named.links["next"]["url"])) == [50, 60, 70, 80]


@pytest.mark.parametrize("points", [1, 7, 99, 100, 5_000])
def test_a_few_steps_stand_for_many(curve, client, points):
    found = steps(client.get(curve, params={"points": points}))
    assert (found[-1], len(found) <= points, found == sorted(set(found))) == (100, True, True)
    assert len(found) >= min(points, 100) / 2
    assert set(steps(client.get(curve, params={"points": points, "name": "own/score"}))) <= {*range(10, 101, 10)}


def test_what_cannot_be_read_is_named(curve, client):
    behind = client.get(curve, params={"limit": 1}).links["next"]["url"]
    cursor = behind.split("cursor=")[1]
    for params, field in (
        ({"points": 0}, "points"),
        ({"name": "two words"}, "name"),
        ({"after": -2}, "after"),
        ({"points": 5, "cursor": cursor}, "points"),
    ):
        answer = client.get(curve, params=params)
        assert (answer.status_code, field in answer.text) == (422, True)
    assert client.get("/api/v1/jobs/none-1a2b3c4d/metrics").status_code == 404


def test_only_members_say_numbers_and_only_of_steps_that_the_job_has(running, make_agent, client, clock):
    job_id, agent, _ = running
    stranger = make_agent("stranger")
    assert [refusal.part for refusal in stranger.sync(metrics=(row(job_id, clock, 1),)).refusals] == ["jobs"]
    (refusal,) = agent.sync(metrics=(row(job_id, clock, 1_001),)).refusals
    assert (refusal.part, refusal.reason) == ("metrics", "step 1001 is after the last step, 1000")
    report = agent.report().model_dump(mode="json") | {
        "metrics": [
            {"job_id": job_id, "generation": 1, "step": 3, "at_utc": clock().isoformat(), "values": {"no name": 1.0}},
            {"job_id": job_id, "generation": 1, "step": 4, "at_utc": clock().isoformat(), "values": {"loss": 1.0}},
        ]
    }
    answer = client.post("/agent/v1/sync", json=report, headers=agent.headers).json()
    assert [(item["part"], item["key"]) for item in answer["refusals"]] == [("metrics", f"{job_id}/1/3")]
    assert steps(client.get(f"/api/v1/jobs/{job_id}/metrics")) == [4]


def test_a_report_has_so_many_and_those_of_an_unknown_generation_wait(running, client, clock):
    job_id, agent, _ = running
    assert agent.sync(metrics=tuple(row(job_id, clock, step) for step in range(METRICS_PER_REPORT_MAX))).refusals == ()
    before = steps(client.get(f"/api/v1/jobs/{job_id}/metrics"))
    assert agent.sync(metrics=(row(job_id, clock, 900, generation=7),)).refusals == ()
    assert steps(client.get(f"/api/v1/jobs/{job_id}/metrics")) == before == [*range(METRICS_PER_REPORT_MAX)]


def test_only_the_newest_steps_are_kept_and_none_of_a_job_that_is_deleted(running, client, context, clock, settings):
    job_id, agent, _ = running
    object.__setattr__(settings, "metrics_rows_max", 10)
    agent.sync(metrics=tuple(row(job_id, clock, step) for step in range(1, 31)))
    with context.sessions.begin() as session:
        session.get_one(JobRow, job_id).highest_step = 30
    assert upkeep.tick(context) == 20
    assert steps(client.get(f"/api/v1/jobs/{job_id}/metrics")) == [*range(21, 31)]
    with context.sessions.begin() as session:
        session.get_one(JobRow, job_id).state = "finished"
    assert client.delete(f"/api/v1/jobs/{job_id}").status_code == 204
    with context.sessions() as session:
        assert session.query(tables.StepMetricsRow).count() == 0
