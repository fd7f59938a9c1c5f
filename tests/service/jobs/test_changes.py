"""Jobs that are changed, paused and deleted over REST."""

import pytest
from sqlalchemy import select, text

from service.db.base import Base
from service.jobs import deletion
from service.jobs.operations import set_state
from service.jobs.tables import JobRow, JobState, JobStepRow, RankLogRow
from tests.service.fake_agent import JOB
from tests.service.reconcilers.conftest import Fleet, fleet

__all__ = ["fleet"]


@pytest.fixture
def path(client) -> str:
    return f"/api/v1/jobs/{client.post('/api/v1/jobs', json=JOB).json()['job_id']}"


def put_in(context, path: str, state: JobState) -> None:
    with context.sessions.begin() as session:
        job = session.get_one(JobRow, path.rpartition("/")[2])
        set_state(session, job, state, "a test", now=job.created_at)


def test_what_may_change_is_changed_and_what_is_not_named_stays(client, path):
    before = client.get(path).json()["spec"]
    change = {"name": "other", "nodes": {"max": 8}, "stop": {"steps": 5_000}, "checkpoint": {"every_steps": 7}}
    change |= {"hang_restart_s": 0.0, "hook_s_max": 60.0, "budget_usd": 5.5, "deadline": "2030-01-31T12:00:00Z"}
    answer = client.patch(path, json=change)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["name"], answer.json()["stop_steps"]) == ("other", 5_000)
    expected = before | change | {"nodes": {"min": 2, "max": 8}}
    expected["checkpoint"] = before["checkpoint"] | change["checkpoint"]
    assert client.get(path).json()["spec"] == expected
    assert client.patch(path, json={"budget_usd": None}).status_code == 200
    assert client.get(path).json()["spec"]["budget_usd"] is None
    audit = client.get("/api/v1/audit?limit=2").json()
    assert [row["action"] for row in audit] == ["update_job"] * 2
    assert [row["detail"] for row in audit] == [{"budget_usd": None}, change]


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"model": JOB["model"]}, "model", "submit another job"),
        ({"seed": 5}, "seed", "cannot be changed"),
        ({"checkpoint": {"path": "/other"}}, "checkpoint.path", "checkpoints that exist lie by it"),
        ({"environment": {"A": "1"}}, "environment", "processes that were started have it"),
        ({"colour": 1}, "colour", "is not a known field"),
        ({"nodes": {"min": 5}}, "nodes.max", "must be at least nodes.min 5"),
        ({"nodes": {"max": 3}}, "layouts.pinned.0.layout", "nodes 4 must be within nodes 2..3"),
        ({"nodes": {"max": "3"}}, "nodes.max", "must be a whole number"),
        ({"name": None}, "name", "must be text"),
        ({"name": "no spaces"}, "name", "begin with a letter"),
        ({"stop": {"steps": 0}}, "stop.steps", "greater than or equal to 1"),
        ({"budget_usd": 0}, "budget_usd", "greater than 0"),
        ({"hang_restart_s": -1}, "hang_restart_s", "greater than or equal to 0"),
        ({"hook_s_max": 0}, "hook_s_max", "greater than 0"),
        ({"deadline": "soon"}, "deadline", "2030-01-31T12:00:00Z"),
        ({"deadline": "9999-12-31T23:59:59-14:00"}, "deadline", "less than 2100"),
        ({}, "(whole)", "must name what is to be changed"),
        ({"nodes": {}}, "nodes", "must name what is to be changed"),
        ([], "(whole)", "must be a mapping of fields"),
    ],
)
def test_what_may_not_change_is_refused_by_field_with_the_reason(client, path, change, field, rule):
    before = client.get(path).json()["spec"]
    answer = client.patch(path, json=change)
    assert answer.status_code == 422, answer.text
    found = [(error["field"], error["rule"]) for error in answer.json()["errors"]]
    assert any(where == field and rule in what for where, what in found), found
    assert client.get(path).json()["spec"] == before


def test_what_ranks_read_at_their_start_changes_only_while_there_are_none(client, context, path):
    for state in (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING, JobState.STOPPING):
        put_in(context, path, state)
        for change in ({"stop": {"steps": 9}}, {"checkpoint": {"every_steps": 9}}):
            answer = client.patch(path, json=change)
            assert (answer.status_code, "pause it first" in answer.json()["detail"]) == (409, True)
        assert client.patch(path, json={"nodes": {"max": 5}}).status_code == 200
    put_in(context, path, JobState.FAILED)
    assert client.patch(path, json={"name": "x"}).status_code == 409


def test_which_handoff_is_preferred_changes_while_the_job_trains(client, context, path):
    put_in(context, path, JobState.RUNNING)
    assert client.get(path).json()["spec"].get("prefer", "pause") == "pause"
    assert client.patch(path, json={"prefer": "total"}).status_code == 200
    assert client.get(path).json()["spec"]["prefer"] == "total"
    refused = client.patch(path, json={"prefer": "cheap"})
    assert refused.status_code == 422
    (problem,) = refused.json()["errors"]
    assert (problem["field"], "'pause' or 'total'" in problem["rule"]) == ("prefer", True)


def test_a_job_that_somebody_else_has_changed_meanwhile_is_neither_changed_nor_deleted(client, context, path):
    seen = {"If-Match": client.get(path).headers["etag"]}
    with context.sessions.begin() as session:
        session.get_one(JobRow, path.rpartition("/")[2]).last_step = 7
    assert client.get(path).headers["etag"] != seen["If-Match"]
    assert client.patch(path, json={"name": "mine"}, headers=seen).status_code == 200, "steps go on all the time"
    for answer in (client.patch(path, json={"name": "late"}, headers=seen), client.delete(path, headers=seen)):
        assert answer.status_code in (409, 412)
    assert client.patch(path, json={"name": "late"}, headers=seen).json()["code"] == "precondition-failed"
    assert client.get(path).json()["name"] == "mine"


def test_a_paused_job_frees_its_nodes_with_a_checkpoint_and_goes_on_when_it_is_resumed(fleet: Fleet):
    fleet.run()
    path = f"/api/v1/jobs/{fleet.job_id}"
    for _ in range(2):
        assert fleet.client.post(f"{path}/pause").json()["paused"]
    fleet.jump(30)
    for _ in range(2):
        fleet.round()
    assert fleet.agents["a"].job_order().saves_at_end
    fleet.round(parts={"a": {"checkpoints": (fleet.checkpoint(31),)}})
    fleet.round()
    job = fleet.job()
    assert job["state"] == "suspended" and "first-operator asked for a pause" in job["reason"], job["reason"]
    assert [node["jobs"] for node in fleet.client.get("/api/v1/nodes").json()] == [[]] * 4
    assert fleet.client.patch(path, json={"stop": {"steps": 31}}).status_code == 409, "a checkpoint is as far"
    assert fleet.client.patch(path, json={"stop": {"steps": 2_000}}).status_code == 200
    assert fleet.client.post(f"{path}/resume", json={"steps": 5_000}).status_code == 409
    assert not fleet.client.post(f"{path}/resume", json={}).json()["paused"]
    for _ in range(4):
        fleet.round()
    job = fleet.job()
    assert job["state"] == "running" and job["generations"][-1]["checkpoint_step"] == 31
    assert fleet.agents["a"].job_order().spec.stop.steps == 2_000
    assert fleet.client.post(f"{path}/resume", json={}).status_code == 409
    actions = [row["action"] for row in fleet.client.get("/api/v1/audit", params={"target": fleet.job_id}).json()]
    assert actions == ["resume_job", "update_job", "pause_job", "pause_job", "submit_job"]


def test_a_pending_job_that_is_paused_does_not_start_and_a_stopped_one_cannot_be_paused(fleet: Fleet):
    fleet.submit()
    path = f"/api/v1/jobs/{fleet.job_id}"
    fleet.client.post(f"{path}/pause")
    fleet.add("a", "b", "c", "d")
    for _ in range(3):
        fleet.round()
    assert fleet.job()["state"] == "pending" and "waiting for somebody to resume it" in fleet.job()["reason"]
    fleet.client.post(f"{path}/stop")
    fleet.round()
    assert fleet.job()["state"] == "stopped"
    assert fleet.client.post(f"{path}/pause").status_code == 409


def test_a_job_without_a_place_for_checkpoints_is_not_paused_while_it_has_ranks(client, context):
    bare = {name: value for name, value in JOB.items() if name != "checkpoint"}
    path = f"/api/v1/jobs/{client.post('/api/v1/jobs', json=bare).json()['job_id']}"
    put_in(context, path, JobState.RUNNING)
    answer = client.post(f"{path}/pause")
    assert answer.status_code == 409 and "would lose every step" in answer.json()["detail"]


@pytest.mark.thorough
def test_only_a_job_that_has_ended_is_deleted_wholly_and_in_parts(fleet: Fleet, context, monkeypatch):
    monkeypatch.setattr(deletion, "PART_ROWS", 3)
    path = fleet.stopped()
    other = fleet.client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    refused = fleet.client.delete(f"/api/v1/jobs/{other}")
    assert refused.status_code == 409 and "stop it first" in refused.json()["detail"]
    with context.sessions.begin() as session:
        for job_id in (fleet.job_id, other):
            session.add_all(
                RankLogRow(job_id=job_id, generation=1, rank=0, start_offset=at, text="x", recorded_at=fleet.clock())
                for at in range(8)
            )
        ledger = session.scalar(text("SELECT count(*) FROM ledger WHERE job_id = :job_id"), {"job_id": fleet.job_id})
        assert session.scalars(select(JobStepRow).where(JobStepRow.job_id == fleet.job_id)).all() and ledger
    before = fleet.client.get("/api/v1/ledger", params={"job_id": fleet.job_id}).json()
    answer = fleet.client.delete(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert fleet.client.get(path).status_code == fleet.client.delete(path).status_code == 404
    with context.sessions() as session:
        for table in Base.metadata.sorted_tables:
            if "job_id" in table.c and table.name not in ("ledger", "ledger_sums"):
                left = session.execute(select(table.c.job_id).distinct()).scalars().all()
                assert fleet.job_id not in left, table.name
        assert len(session.scalars(select(RankLogRow)).all()) == 8, "those of the other job"
    assert fleet.client.get("/api/v1/ledger", params={"job_id": fleet.job_id}).json() == before
    assert fleet.client.get("/api/v1/audit").json()[0]["action"] == "delete_job"
    for _ in range(3):
        fleet.round()


@pytest.mark.thorough
def test_a_deletion_that_is_too_much_at_once_is_continued_by_the_next(fleet: Fleet, context, monkeypatch):
    monkeypatch.setattr(deletion, "PART_ROWS", 1)
    monkeypatch.setattr(deletion, "PARTS_MAX", 3)
    path = fleet.stopped()
    answers = [fleet.client.delete(path).status_code for _ in range(12)]
    assert answers[0] == 503 and 204 in answers and set(answers[: answers.index(204)]) == {503}
