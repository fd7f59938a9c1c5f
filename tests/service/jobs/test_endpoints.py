"""REST of jobs: what is accepted, and how what is not is refused."""

import json

import pytest
import yaml
from sqlalchemy import func, select

from liver_core.layout import ParallelLayout
from service.jobs.operations import activate, add_generation, lock_job, new_birth
from service.jobs.tables import CheckpointRow, JobRow, JobStepRow, SourceKind
from tests.service.fake_agent import JOB, another_job, roster


def test_a_job_file_is_accepted_as_yaml_and_as_json(client):
    for content in (yaml.safe_dump(JOB), json.dumps(another_job("other"))):
        answer = client.post("/api/v1/jobs", content=content)
        assert answer.status_code == 201, answer.text
        assert answer.json()["state"] == "pending"
    assert len(client.get("/api/v1/jobs").json()) == 2


def test_a_checkpoint_path_of_another_job_that_has_not_ended_is_refused_by_field(client, context):
    def submit(path: str):
        return client.post("/api/v1/jobs", json=JOB | {"checkpoint": {"path": path}})

    first = submit("/data/a").json()["job_id"]
    assert submit("/data/a/b").status_code == client.post("/api/v1/jobs", json=JOB).status_code == 201
    answer = submit("/data/./a/")
    assert answer.status_code == 422
    rule = f"must be a path of its own: job {first}, which has not ended, writes its checkpoints there"
    assert answer.json()["errors"] == [{"field": "checkpoint.path", "rule": rule}]
    written = {"job_id": first, "path": "/data/a/step-000000010", "generation": 1, "step": 10}
    with context.sessions.begin() as session:
        session.get_one(JobRow, first).state = "failed"
        session.add(CheckpointRow(**written, finished_at=context.clock(), size_bytes=None, seconds=None))
    assert submit("/data/a").status_code == 201
    resumed = client.post(f"/api/v1/jobs/{first}/resume", json={"steps": 100_000})
    assert resumed.status_code == 409 and "which has not ended, writes to /data/a" in resumed.text


def test_secrets_in_a_job_file_are_hidden_from_who_reads_the_job_and_references_are_shown(client, database):
    reference = {"from_env": "WANDB_API_KEY"}
    environment = {"HF_TOKEN": "hunter2", "NCCL_DEBUG": "INFO", "WANDB_API_KEY": reference}
    submitted = client.post("/api/v1/jobs", content=json.dumps(JOB | {"environment": environment}))
    assert submitted.status_code == 201, submitted.text
    shown = client.get(f"/api/v1/jobs/{submitted.json()['job_id']}")
    seen = shown.json()["spec"]["environment"]
    assert (seen["HF_TOKEN"], seen["NCCL_DEBUG"]) == ("(hidden)", "INFO")
    assert seen["WANDB_API_KEY"]["from_env"] == "WANDB_API_KEY"
    assert "hunter2" not in submitted.text + shown.text + client.get("/api/v1/jobs").text
    with database.sessions() as session:
        assert session.scalars(select(JobRow)).one().spec["environment"] == environment, "the nodes get what was given"


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        (
            {"name": "no spaces"},
            "name",
            "begin with a letter or a digit, such as gpt-small; is 'no spaces'; did you mean no-spaces?",
        ),
        ({"nam": 1}, "nam", "is not a known field; did you mean name?"),
        ({"model": None}, "model", "must be a mapping of fields, such as {num_layers: 6,"),
        ({"global_batch": 0}, "global_batch", "greater than or equal to 1"),
        ({"micro_batch": 5}, "micro_batch", "global_batch 24 must be divisible by micro_batch 5"),
        ({"nodes": {"min": 4, "max": 2}}, "nodes.max", "nodes.max 2 must be at least nodes.min 4"),
        (
            {"entrypoint": "os.system"},
            "entrypoint",
            "package.module:Class, such as my_package.training:MyJob; is 'os.system'",
        ),
        ({"environment": {"A-B": "1"}}, "environment.A-B.[key]", "must be letters, digits and underscores"),
        ({"environment": {"A": {}}}, "environment.A.from_env", "give either from_file or from_env"),
        ({"environment": {"A": {"from_file": "a"}}}, "environment.A.from_file", "must be the whole path of a file"),
        ({"stop": {"steps": 0}}, "stop.steps", "greater than or equal to 1"),
        ({"ddp": {"overlap_param_gather": True}}, "ddp.overlap_param_gather", "needs ddp.overlap_grad_reduce"),
        ({"ddp": {"bucket_size": 1000}}, "ddp.bucket_size", "needs ddp.overlap_grad_reduce"),
        (
            {"ddp": {"overlap_grad_reduce": True, "bucket_size": 0}},
            "ddp.bucket_size",
            "greater than or equal to 1",
        ),
        ({"ddp": {"overlap_grad_reduce": "maybe"}}, "ddp.overlap_grad_reduce", "must be true or false; is 'maybe'"),
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
        (
            {"start_from": "checkpoints/step-5"},
            "start_from",
            "must be the whole path of a checkpoint, such as /data/checkpoints/first/step-000000500",
        ),
        ({"start_from": "/c/step-000001000"}, "stop", "steps 1000 must be above 1000, the step of start_from"),
        ({"start_from": "/c/iter_0001000"}, "stop", "steps 1000 must be above 1000, the step of start_from"),
        (
            {"start_from": "/c"},
            "start_from",
            "/data/gpt/iter_0000500 (latest_checkpointed_iteration.txt beside it says",
        ),
        ({"budget_usd": -1}, "budget_usd", "greater than 0"),
        ({"deadline": "tomorrow"}, "deadline", "such as 2030-01-31T12:00:00Z; is 'tomorrow'"),
        ({"layouts": {"allowed": ["TP2 PP2"]}}, "layouts.allowed.0", "is 'TP2 PP2'; did you mean TP2xPP2?"),
        ({"layouts": {"allowed": ["TP2xTP2"]}}, "layouts.allowed.0", "names TP twice"),
        (
            {"layouts": {"pinned": [{"nodes": 4, "layout": "PP2xPP2"}]}},
            "layouts.pinned.0.layout",
            "names PP twice",
        ),
        (
            {"layouts": {"allowed": ["PP5"]}},
            "layouts.allowed.0",
            "model.num_layers: 12 must be divisible by PP 5 of layout TP1xPP5xDP1",
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
        (
            {"layouts": {"allowed": ["EP2xDP2"]}},
            "layouts.allowed.0",
            "model.num_experts: TP1xPP1xDP2xEP2 splits experts, and the model has none",
        ),
        (
            {"model": JOB["model"] | {"share_embeddings_and_output_weights": True}},
            "layouts.pinned.0.layout",
            "model.share_embeddings_and_output_weights: tied embeddings run with PP1 only, layout TP2xPP2xDP1 has PP2",
        ),
        (
            {"args": {"share_embeddings_and_output_weights": True}},
            "args.share_embeddings_and_output_weights",
            "belongs to model.share_embeddings_and_output_weights",
        ),
        ({"args": {"num_experts": 8}}, "args.num_experts", "belongs to model.num_experts"),
        (
            {"args": {"expert_model_parallel_size": 2}},
            "args.expert_model_parallel_size",
            "belongs to layouts, as EP2 in layouts.allowed",
        ),
        (
            {"layouts": {"limits": {"expert_model_parallel": [2]}}},
            "layouts.limits.expert_model_parallel",
            "needs model.num_experts",
        ),
        (
            {"args": {"context_parallel_size": 2}},
            "args.context_parallel_size",
            "CP2 is not supported: this version runs TP, PP, DP, EP and ETP only",
        ),
        (
            {"args": {"virtual_pipeline_model_parallel_size": 2}},
            "args.virtual_pipeline_model_parallel_size",
            "VPP2 is not supported",
        ),
        ({"layouts": {"allowed": ["PP2xVPP2"]}}, "layouts.allowed.0", "layout with VPP2: this version runs TP,"),
        ({"layouts": {"allowed": ["TP2", "TP2xCP2"]}}, "layouts.allowed.1", "layout with CP2: this version runs TP,"),
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
        ("- a\n- b", "must be a mapping of fields, is a list"),
        ("", "must be a mapping of fields, is empty"),
        ("!!python/object/apply:os.system [ls]", "must be YAML or JSON"),
        (b"\xff\xfe", "must be YAML or JSON"),
    ],
)
def test_what_is_no_job_file_at_all_is_refused_with_the_reason(client, content, rule):
    answer = client.post("/api/v1/jobs", content=content)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["rule"].startswith(rule)


def test_an_environment_reaches_the_job_as_it_was_written(client):
    text = "OMP_NUM_THREADS: 1\n  MASK: 010\n  RATIO: 1.10\n  AT: 12:30\n  FLAG: yes\n  WORD: 'x y'"
    content = yaml.safe_dump({**JOB, "environment": None}).replace("environment: null", f"environment:\n  {text}")
    job_id = client.post("/api/v1/jobs", content=content).json()["job_id"]
    found = client.get(f"/api/v1/jobs/{job_id}").json()["spec"]["environment"]
    assert found == {
        "OMP_NUM_THREADS": "1", "MASK": "010", "RATIO": "1.10", "AT": "12:30", "FLAG": "yes", "WORD": "x y",
    }  # fmt: skip


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


def test_jobs_are_found_by_the_beginning_of_id_random_part_or_name(client):
    first, second = (
        client.post("/api/v1/jobs", json=another_job(name)).json()["job_id"] for name in ("alpha_1", "alpha-12")
    )

    def found(match: str) -> set[str]:
        return {job["job_id"] for job in client.get("/api/v1/jobs", params={"match": match}).json()}

    assert found("alpha") == {first, second}
    assert found("alpha_") == {first}, "an underscore is no wildcard"
    assert found("%") == set()
    assert found(first) == found(first[-8:]) == found(first[-8:-1]) == {first}
    assert found(first[-5:]) == set()


def test_the_pace_is_that_of_the_last_steps_of_the_running_generation(client, context, clock, make_agent):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    assert client.get(f"/api/v1/jobs/{job_id}").json()["pace"] == {"steps_per_s": None, "remaining_s": None}
    with context.sessions.begin() as session:
        job = lock_job(session, job_id)
        for generation, took in ((1, 9.0), (2, 0.5)):
            members = roster(job_id, generation, ParallelLayout(pp=2), "a", "b")
            birth = new_birth(SourceKind.INIT, "for a test")
            add_generation(session, job, members, birth, parent=generation - 1 or None, now=clock())
            session.add_all(
                JobStepRow(job_id=job_id, generation=generation, step=step, seconds=took, finished_at=clock())
                for step in range(40)
            )
            activate(session, job, expected=generation - 1 or None, generation=generation)
        job.state, job.last_step = "running", 40
    pace = client.get(f"/api/v1/jobs/{job_id}").json()["pace"]
    assert pace == {"steps_per_s": pytest.approx(2.0), "remaining_s": pytest.approx((1000 - 40) / 2.0)}


def test_a_watch_of_a_long_job_begins_with_its_newest_steps(client, context, clock):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    with context.sessions.begin() as session:
        job = lock_job(session, job_id)
        add_generation(
            session,
            job,
            roster(job_id, 1, ParallelLayout(pp=2), "a", "b"),
            new_birth(SourceKind.INIT, ""),
            parent=None,
            now=clock(),
        )
        session.add_all(
            JobStepRow(job_id=job_id, generation=1, step=step, seconds=1.0, finished_at=clock())
            for step in range(1, 801)
        )
        job.last_step, job.state = 800, "finished"
    with client.stream("GET", f"/api/v1/jobs/{job_id}/watch") as stream:
        event = next(json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:"))
    assert [step["step"] for step in event["steps"]] == list(range(301, 801))


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
