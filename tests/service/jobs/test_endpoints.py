"""REST of jobs: what is accepted, and how what is not is refused."""

import json

import pytest
import yaml
from sqlalchemy import func, select

from liver_core.layout import ParallelLayout
from service.jobs.operations import activate, add_generation, lock_job, new_birth
from service.jobs.tables import JobRow, SourceKind
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB, roster


def test_a_job_file_is_accepted_as_yaml_and_as_json(client):
    for content in (yaml.safe_dump(JOB), json.dumps(JOB)):
        answer = client.post("/api/v1/jobs", content=content)
        assert answer.status_code == 201, answer.text
        assert answer.json()["state"] == "pending"
    assert len(client.get("/api/v1/jobs").json()) == 2


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"name": "no spaces"}, "name", "pattern"),
        ({"nam": 1}, "nam", "is not a known field"),
        ({"model": None}, "model", "Input should be"),
        ({"global_batch": 0}, "global_batch", "greater than or equal to 1"),
        ({"micro_batch": 5}, "(whole)", "global_batch 24 must be divisible by micro_batch 5"),
        ({"nodes": {"min": 4, "max": 2}}, "nodes", "nodes.max 2 must be at least nodes.min 4"),
        ({"entrypoint": "os.system"}, "entrypoint", "pattern"),
        ({"environment": {"A-B": "1"}}, "environment.A-B.[key]", "pattern"),
        ({"stop": {"steps": 0}}, "stop.steps", "greater than or equal to 1"),
        ({"ddp": {"overlap_param_gather": True}}, "ddp.overlap_param_gather", "needs ddp.overlap_grad_reduce"),
        ({"ddp": {"bucket_size": 1000}}, "ddp.bucket_size", "needs ddp.overlap_grad_reduce"),
        (
            {"ddp": {"overlap_grad_reduce": True, "bucket_size": 0}},
            "ddp.bucket_size",
            "greater than or equal to 1",
        ),
        ({"ddp": {"overlap_grad_reduce": "maybe"}}, "ddp.overlap_grad_reduce", "valid boolean"),
        ({"ddp": {"bucket_elements": 1000}}, "ddp.bucket_elements", "is not a known field"),
        ({"drop_step": {"every_micro_batches": 0}}, "drop_step.every_micro_batches", "greater than or equal to 1"),
        ({"drop_step": {"every_micro_batches": 24}}, "drop_step", "every_micro_batches 24 must be below 24"),
        (
            {"drop_step": {"every_micro_batches": 6}, "layouts": {"allowed": ["DP4", "TP2xDP4"]}},
            "drop_step",
            "every_micro_batches 6 must be below 6, the most micro-batches of a step that a data-parallel rank has",
        ),
        ({"extra_bytes_max": 0}, "extra_bytes_max", "greater than or equal to 1"),
        ({"extra_bytes_max": 1, "host_bytes_max": -1}, "host_bytes_max", "greater than or equal to 1"),
        ({"host_bytes_max": 1}, "host_bytes_max", "needs extra_bytes_max"),
        ({"budget_usd": -1}, "budget_usd", "greater than 0"),
        ({"deadline": "tomorrow"}, "deadline", "datetime"),
        ({"layouts": {"allowed": ["TP2 PP2"]}}, "layouts.allowed.0", "pattern"),
        ({"layouts": {"allowed": ["TP2xTP2"]}}, "layouts.allowed", "axis TP is written twice"),
        (
            {"layouts": {"allowed": ["PP5"]}},
            "layouts.allowed.0",
            "model.num_layers: 12 must be divisible by PP x VPP 5 of layout TP1xPP5xDP1",
        ),
        (
            {"layouts": {"pinned": [{"nodes": 3, "layout": "TP3"}]}},
            "layouts.pinned.0.layout",
            "model.num_attention_heads: 4 must be divisible by TP 3 of layout TP3xPP1xDP1",
        ),
        (
            {"layouts": {"pinned": [{"nodes": 9, "layout": "PP3xDP3"}]}},
            "layouts.pinned.0.layout",
            "nodes 9 must be within nodes 2..4",
        ),
        (
            {"layouts": {"allowed": ["DP16"]}},
            "layouts.allowed.0",
            "global_batch: 24 must be divisible by micro_batch x DP 16 of layout TP1xPP1xDP16",
        ),
        ({"layouts": {"allowed": ["EP2xDP2"]}}, "layouts.allowed.0", "model.num_experts: must be set for EP 2"),
    ],
)
def test_a_bad_job_file_names_field_and_rule_and_registers_nothing(client, context, change, field, rule):
    answer = client.post("/api/v1/jobs", json=JOB | change)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    found = [(error["field"], error["rule"]) for error in answer.json()["errors"]]
    assert any(where == field and rule in what for where, what in found), found
    with context.sessions() as session:
        assert session.scalar(select(func.count()).select_from(JobRow)) == 0


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("name: [", "must be YAML or JSON"),
        ("- a\n- b", "must be a mapping of fields, not list"),
        ("", "must be a mapping of fields, not NoneType"),
        ("!!python/object/apply:os.system [ls]", "must be YAML or JSON"),
        (b"\xff\xfe", "must be YAML or JSON"),
    ],
)
def test_what_is_no_job_file_at_all_is_refused_with_the_reason(client, content, rule):
    answer = client.post("/api/v1/jobs", content=content)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["rule"].startswith(rule)


def test_a_job_file_that_is_too_large_is_413(client):
    answer = client.post("/api/v1/jobs", content=b"#" * (1024 * 1024 + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")


@pytest.mark.parametrize("path", ["", "/stop", "/steps", "/logs", "/watch"])
def test_an_unknown_job_is_404_and_named(client, path):
    answer = client.request("POST" if path == "/stop" else "GET", f"/api/v1/jobs/none-1{path}")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "there is no job 'none-1'"


@pytest.mark.parametrize(
    "header", ["", "Bearer x", "Bearer liver_1_2", "Bearer liver__", "Basic abc", "Bearer " + "x" * 999]
)
def test_a_wrong_token_is_401_everywhere_and_says_how_to_send_one(client, header):
    for path in ("/api/v1/jobs", "/api/v1/nodes", "/api/v1/ledger", "/api/v1/openapi.json", "/agent/v1/wake?node_id=a"):
        answer = client.get(path, headers={"Authorization": header})
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "Authorization: Bearer" in answer.json()["detail"]


def test_health_needs_no_token(client):
    for path in ("/healthz", "/readyz"):
        assert client.get(path, headers={"Authorization": ""}).json()["status"] == "ok"


def test_a_stopped_job_may_be_stopped_again_but_not_a_finished_one(client, context, make_agent):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    assert client.post(f"/api/v1/jobs/{job_id}/stop").status_code == 200
    assert client.post(f"/api/v1/jobs/{job_id}/stop").status_code == 200
    with context.sessions.begin() as session:
        session.get_one(JobRow, job_id).state = "finished"
    answer = client.post(f"/api/v1/jobs/{job_id}/stop")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")


def test_the_active_generation_changes_only_from_the_one_that_is_expected(client, context, clock):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    with context.sessions.begin() as session:
        job = lock_job(session, job_id)
        for generation in (1, 2):
            birth = new_birth(SourceKind.INIT, "test")
            add_generation(
                session, job, roster(job_id, generation, ParallelLayout(), "a"), birth, parent=None, now=clock()
            )
        assert activate(session, job, expected=None, generation=1)
        assert not activate(session, job, expected=None, generation=2)
        assert job.active_generation == 1
        assert activate(session, job, expected=1, generation=2)
        assert job.next_generation == 3


def test_every_operation_of_the_description_has_a_unique_id_and_a_summary(client):
    paths = client.get("/api/v1/openapi.json").json()["paths"]
    operations = [operation for methods in paths.values() for operation in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) and {"submit_job", "sync", "wake", "show_ledger", "list_handoffs"} <= set(ids)
    assert all(operation.get("summary") for operation in operations)


def test_the_status_page_asks_for_a_token_and_keeps_a_signed_cookie(client, settings):
    anonymous = {"Authorization": ""}
    assert "Log in" in client.get("/", headers=anonymous).text
    token = bearer(settings, "script")["Authorization"].removeprefix("Bearer ")
    assert client.post("/login", data={"token": "liver_x_y"}, follow_redirects=False).status_code == 401
    agent = bearer(settings, "agent")["Authorization"].removeprefix("Bearer ")
    assert client.post("/login", data={"token": agent}, follow_redirects=False).status_code == 401
    answer = client.post("/login", data={"token": token}, follow_redirects=False)
    cookie = answer.headers["set-cookie"]
    assert answer.status_code == 303 and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert token.rpartition("_")[2] not in cookie
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    page = client.get("/", headers=anonymous)
    assert job_id in page.text and "default-src 'none'" in page.headers["content-security-policy"]
    assert "demo" in client.get(f"/jobs/{job_id}", headers=anonymous).text
    client.cookies.set("liver_session", client.cookies["liver_session"][:-1] + "x")
    assert "Log in" in client.get("/", headers=anonymous).text
