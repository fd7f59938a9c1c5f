"""Every verb against a real service process with an embedded PostgreSQL on loopback, as a person would use it."""

import json
import re
import stat
from pathlib import Path

import pytest
import yaml

from liver_core.layout.fit import EXPERTS_RUN
from tests.service.cli.conftest import Service
from tests.service.fake_agent import JOB, JOB_OF_MANY


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB | {"checkpoint": {"path": str(tmp_path)}}))
    return path


def test_serve_says_where_it_listens_and_where_the_tokens_are_but_shows_none(service: Service):
    assert "service: http://127.0.0.1:" in service.output
    assert str(service.data_dir / "tokens" / "operator.token") in service.output
    token = (service.data_dir / "tokens" / "operator.token").read_text().strip()
    assert token not in service.output


def test_a_submitted_job_is_listed_shown_stopped_and_watched_to_its_end(service: Service, job_file: Path):
    submitted = service.run("jobs", "submit", str(job_file))
    assert submitted.exit_code == 0, submitted.output
    job_id = submitted.stdout.strip()
    listed = service.run("jobs", "list")
    assert job_id in listed.stdout and "pending" in listed.stdout
    # Until its reconciler has looked at it, it is only submitted.
    shown = next(seen for _ in range(100) if "submitted" not in (seen := service.run("jobs", "show", job_id)).stdout)
    assert "0 nodes are ready" in shown.stdout and "no generation yet" in shown.stdout
    assert json.loads(service.run("jobs", "show", job_id, "--json").stdout)["spec"]["name"] == "demo"
    rotated = service.run("jobs", "rotate-key", job_id)
    assert rotated.exit_code == 0 and f"{job_id}: has a new key" in rotated.stdout
    stopped = service.run("jobs", "stop", job_id)
    assert stopped.exit_code == 0 and job_id in stopped.stdout
    watched = service.run("jobs", "watch", job_id)
    assert watched.exit_code == 0 and "stopped" in watched.stdout
    events = [json.loads(line) for line in service.run("jobs", "watch", job_id, "--json").stdout.splitlines()]
    assert events[-1]["job"]["state"] == "stopped"
    resumed = service.run("jobs", "resume", job_id)
    assert resumed.exit_code == 1 and "has no checkpoint to continue from" in resumed.stderr
    saved = service.run("jobs", "checkpoint", job_id)
    assert saved.exit_code == 1 and "is stopped: only a running job can write a checkpoint" in saved.stderr
    exported = service.run("jobs", "export", job_id, "--to", "never-made")
    assert exported.exit_code == 1 and f"job {job_id} has no checkpoint" in exported.stderr


def test_lists_without_rows_say_so_to_people_and_are_empty_lists_for_programs(service: Service):
    for noun in ("nodes", "handoffs", "notices", "incidents"):
        assert service.run(noun, "list").stdout.strip() == f"no {noun}"
        assert json.loads(service.run(noun, "list", "--json").stdout) == []


def test_a_list_is_filtered_and_says_when_there_is_more_of_it(service: Service, tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB_OF_MANY | {"name": "paged"}))
    ids = [service.run("jobs", "submit", str(path)).stdout.strip() for _ in range(3)]
    first = service.run("jobs", "list", "--name", "paged", "--state", "pending", "--limit", "2", "--json")
    assert [job["job_id"] for job in json.loads(first.stdout)] == ids[:0:-1]
    assert first.stderr == "note: there are more; --all lists every one, --limit so many\n"
    for wanted in ("--all", "--limit=3"):
        every = service.run("jobs", "list", "--name", "paged", wanted, "--json")
        assert [job["job_id"] for job in json.loads(every.stdout)] == ids[::-1] and every.stderr == ""
    wrong = service.run("jobs", "list", "--state", "happy")
    assert wrong.exit_code == 1 and "state.0: must be" in wrong.stderr
    for job_id in ids:
        service.run("jobs", "stop", job_id)


def test_a_job_is_changed_paused_planned_and_deleted_and_its_decisions_are_listed(service: Service, job_file: Path):
    job_id = service.run("jobs", "submit", str(job_file)).stdout.strip()
    wanted = ("--nodes-max", "6", "--steps", "70", "--deadline", "none", "--prefer", "total")
    wanted += ("--hang-restart-s", "0", "--hook-s-max", "90")
    changed = service.run("jobs", "update", job_id, *wanted)
    assert changed.exit_code == 0 and f"{job_id}: changed, pending" in changed.stdout, changed.stderr
    spec = json.loads(service.run("jobs", "show", job_id, "--json").stdout)["spec"]
    assert (spec["nodes"], spec["stop"], spec["prefer"]) == ({"min": 2, "max": 6}, {"steps": 70}, "total")
    assert (spec["hang_restart_s"], spec["hook_s_max"]) == (0.0, 90.0)
    wrong = service.run("jobs", "update", job_id, "--hang-restart-s", "soon")
    assert wrong.exit_code == 2 and "hang_restart_s: must be a number of seconds or none, not 'soon'" in wrong.stderr
    assert service.run("jobs", "update", job_id).exit_code == 2
    wrong = service.run("jobs", "update", job_id, "--nodes-min", "9")
    assert wrong.exit_code == 1 and "nodes.max: nodes.max 6 must be at least nodes.min 9" in wrong.stderr
    assert "a pause was asked for" in service.run("jobs", "pause", job_id).stdout
    assert service.run("jobs", "resume", job_id).exit_code == 0
    plan = service.run("jobs", "plan", job_id)
    assert "suspend: 0 nodes are ready" in plan.stdout and "no layout fits" in plan.stdout
    unknown = service.run("jobs", "plan", job_id, "--without", "nobody")
    assert unknown.exit_code == 1 and "without: must be nodes that the job may use, not nobody" in unknown.stderr
    early = service.run("jobs", "delete", job_id, "--yes")
    assert early.exit_code == 1 and "has not ended" in early.stderr
    service.run("jobs", "stop", job_id)
    assert service.run("jobs", "watch", job_id).exit_code == 0
    decisions = service.run("jobs", "decisions", job_id).stdout
    assert "settle" in decisions and "first-operator" in decisions and "stopped on request" in decisions
    assert service.run("jobs", "delete", job_id).exit_code == 1, "nobody has confirmed it"
    assert service.run("jobs", "delete", job_id, "--yes").stdout == f"{job_id} is deleted\n"
    assert "there is no job" in service.run("jobs", "show", job_id).stderr


def test_a_price_that_was_set_is_listed(service: Service):
    assert service.run("prices", "set", "spot-a", "3.5").exit_code == 0
    assert "3.5000" in service.run("prices", "list").stdout
    assert json.loads(service.run("prices", "list", "--json").stdout)[0]["pool"] == "spot-a"
    earlier = service.run("prices", "set", "spot-a", "2", "--from", "2020-01-01T00:00:00Z", "--egress", "0.02")
    assert earlier.stdout == "spot-a: 2.0000 USD per node hour, 0.0200 USD per GB that leaves\n"
    bought = service.run("prices", "set", "spot-b", "2", "--on-demand", "6")
    assert bought.stdout == "spot-b: 2.0000 USD per node hour, 6.0000 on demand\n"
    every = json.loads(service.run("prices", "list", "--pool", "spot-a", "--json").stdout)
    assert [(item["price_usd_per_hour"], item["egress_usd_per_gb"]) for item in every] == [(3.5, None), (2.0, 0.02)]
    assert "effective_from" in service.run("prices", "set", "spot-a", "2", "--from", "noon").stderr
    endless = service.run("prices", "set", "spot-a", "1e400")
    assert (endless.exit_code, endless.stderr) == (2, "error: price_usd_per_hour: must be a finite number, is inf\n")


def test_logs_of_a_job_that_never_ran_are_empty(service: Service, job_file: Path):
    job_id = service.run("jobs", "submit", str(job_file)).stdout.strip()
    result = service.run("jobs", "logs", job_id, "--rank", "0")
    assert (result.exit_code, result.stdout) == (0, "")
    service.run("jobs", "stop", job_id)


def test_an_impossible_layout_names_its_field_and_its_rule(service: Service, tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB | {"layouts": {"allowed": ["PP5"]}}))
    result = service.run("jobs", "submit", str(path))
    assert result.exit_code == 1 and result.stdout == ""
    assert "layouts.allowed.0" in result.stderr and "12 must be divisible by PP 5" in result.stderr


def test_unknown_and_missing_fields_are_all_named_at_once(service: Service, tmp_path: Path):
    path = tmp_path / "job.yaml"
    content = {name: value for name, value in JOB.items() if name != "stop"}
    path.write_text(yaml.safe_dump(content | {"colour": "red"}))
    result = service.run("jobs", "submit", str(path))
    assert result.exit_code == 1
    assert re.search(r"^  stop: ", result.stderr, re.MULTILINE)
    assert re.search(r"^  colour: ", result.stderr, re.MULTILINE)


def test_text_that_is_not_yaml_is_refused_with_its_place(service: Service, tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text("name: [unclosed")
    result = service.run("jobs", "submit", str(path))
    assert result.exit_code == 1 and "must be YAML or JSON" in result.stderr and "line 1" in result.stderr


def test_a_job_file_that_is_not_there_is_named(service: Service, tmp_path: Path):
    result = service.run("jobs", "submit", str(tmp_path / "absent.yaml"))
    assert result.exit_code == 1 and "absent.yaml: No such file" in result.stderr


def test_a_job_is_meant_by_its_id_the_beginning_of_it_its_random_part_or_its_name(service: Service, tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB_OF_MANY | {"name": "by-name"}))
    job_id = service.run("jobs", "submit", str(path)).stdout.strip()
    for text in (job_id, job_id[:-3], "by-na", "by-name", job_id[-8:], job_id[-8:-2]):
        shown = service.run("jobs", "show", text, "--json")
        assert shown.exit_code == 0 and json.loads(shown.stdout)["job_id"] == job_id, text
    second = service.run("jobs", "submit", str(path)).stdout.strip()
    unclear = service.run("jobs", "stop", "by-name")
    assert unclear.exit_code == 1 and unclear.stdout == ""
    assert f"{job_id}  pending" in unclear.stderr and f"{second}  pending" in unclear.stderr
    assert service.run("jobs", "stop", second).exit_code == 0
    assert service.run("jobs", "watch", second).exit_code == 0
    only_one_goes_on = service.run("jobs", "stop", "by-name")
    assert only_one_goes_on.exit_code == 0 and job_id in only_one_goes_on.stdout


def test_what_of_a_job_file_looks_wrong_from_here_is_noted_and_the_job_is_accepted(service: Service, tmp_path: Path):
    path = tmp_path / "job.yaml"
    environment = {"HF_TOKEN": "hunter2", "S3_KEY": {"from_env": "S3_KEY"}, "NCCL_DEBUG": "INFO"}
    path.write_text(yaml.safe_dump(JOB | {"workdir": str(tmp_path / "absent"), "environment": environment}))
    submitted = service.run("jobs", "submit", str(path))
    assert submitted.exit_code == 0 and re.fullmatch(r"demo-[0-9a-f]{8}\n", submitted.stdout)
    assert f"note: workdir: {tmp_path / 'absent'} is no directory on this machine" in submitted.stderr
    assert "note: environment.HF_TOKEN looks like a secret and stands in the job file" in submitted.stderr
    assert not {"S3_KEY", "NCCL_DEBUG", "hunter2"} & set(re.findall(r"\w+", submitted.stderr))
    assert EXPERTS_RUN not in submitted.stderr
    service.run("jobs", "stop", submitted.stdout.strip())


def test_what_may_have_experts_is_said_of_a_job_that_has_some(service: Service, tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB_OF_MANY | {"model": JOB["model"] | {"num_experts": 4}}))
    submitted = service.run("jobs", "submit", str(path))
    assert submitted.exit_code == 0 and f"note: {EXPERTS_RUN}" in submitted.stderr
    service.run("jobs", "stop", submitted.stdout.strip())


@pytest.mark.parametrize("verb", ["show", "stop", "logs", "watch", "checkpoint", "resume"])
def test_an_unknown_job_is_an_error_on_standard_error(service: Service, verb: str):
    result = service.run("jobs", verb, "nobody-00000000")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no job 'nobody-00000000'" in result.stderr


def test_an_unknown_or_malformed_handoff_is_an_error(service: Service):
    unknown = service.run("handoffs", "show", "2f1c9a52-8f5e-4d6b-9d53-0b6f5c6d7e8f")
    assert unknown.exit_code == 1 and "there is no handoff" in unknown.stderr
    malformed = service.run("handoffs", "show", "seven")
    assert (
        malformed.exit_code == 1 and "there is no handoff 'seven'; liver handoffs list shows them" in malformed.stderr
    )


def test_a_wrong_token_is_told_where_it_came_from_but_not_shown(service: Service, tmp_path: Path):
    path = tmp_path / "wrong.token"
    path.write_text("liver_0123456789ab_notthesecret\n")
    result = service.run("jobs", "list", "--token-file", str(path))
    assert result.exit_code == 1 and str(path) in result.stderr and "notthesecret" not in result.stderr


def test_a_join_token_may_not_read_jobs(service: Service):
    result = service.run("jobs", "list", "--token-file", str(service.data_dir / "tokens" / "join.token"))
    assert result.exit_code == 1 and "has role join; this needs viewer or operator or admin" in result.stderr


def test_an_admin_makes_rotates_and_revokes_tokens_which_are_shown_once(service: Service, tmp_path: Path):
    admin = {"LIVER_TOKEN_FILE": str(service.data_dir / "tokens" / "admin.token")}
    path = tmp_path / "viewer.token"
    made = service.run("tokens", "create", "viewer", "--name", "ci", "--expires", "1h", "--out", str(path), **admin)
    assert made.exit_code == 0 and f"written to {path}" in made.stdout, made.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text().strip() not in made.stdout
    viewer = {"LIVER_TOKEN_FILE": str(path)}
    assert service.run("jobs", "list", **viewer).exit_code == 0
    refused = service.run("prices", "set", "p", "1.0", **viewer)
    assert refused.exit_code == 1 and "has role viewer; this needs operator or admin" in refused.stderr
    token_id = path.read_text().split("_")[1]
    rotated = json.loads(service.run("tokens", "rotate", token_id, "--grace", "1h", "--json", **admin).stdout)
    assert rotated["name"] == "ci" and rotated["token"].startswith("liver_")
    listed = service.run("tokens", "list", **admin).stdout
    assert token_id in listed and rotated["token_id"] in listed and rotated["token"] not in listed
    assert service.run("tokens", "revoke", token_id, **admin).stdout == f"{token_id} (viewer ci) is revoked\n"
    gone = service.run("jobs", "list", **viewer)
    assert gone.exit_code == 1 and "it is unknown, expired or revoked" in gone.stderr
    log = service.run("audit", "--target", token_id, **viewer | {"LIVER_TOKEN_FILE": admin["LIVER_TOKEN_FILE"]}).stdout
    assert [line.split("\t")[3] for line in log.splitlines()[-3:]] == ["revoke token", "rotate token", "create token"]


def test_only_an_admin_sees_tokens_and_a_wrong_time_is_named(service: Service):
    refused = service.run("tokens", "list")
    assert refused.exit_code == 1 and "has role operator; this needs admin" in refused.stderr
    wrong = service.run("tokens", "create", "viewer", "--name", "x", "--expires", "soon")
    assert wrong.exit_code == 2 and "--expires: must be a number with s, min, h or d behind it" in wrong.stderr


def test_a_token_comes_from_the_environment_or_the_data_directory(service: Service):
    token = (service.data_dir / "tokens" / "operator.token").read_text()
    assert service.run("jobs", "list", LIVER_TOKEN_FILE="", LIVER_TOKEN=token).exit_code == 0
    found = service.run("jobs", "list", LIVER_TOKEN_FILE="", LIVER_SERVICE_DATA_DIR=str(service.data_dir))
    assert found.exit_code == 0, found.stderr


def test_without_any_token_every_place_to_put_one_is_named(service: Service, tmp_path: Path):
    result = service.run("jobs", "list", LIVER_TOKEN_FILE="", LIVER_SERVICE_DATA_DIR=str(tmp_path))
    assert result.exit_code == 1
    assert "--token-file" in result.stderr and "LIVER_TOKEN" in result.stderr


def test_a_token_file_that_cannot_be_read_is_named(service: Service, tmp_path: Path):
    result = service.run("jobs", "list", "--token-file", str(tmp_path / "none.token"))
    assert result.exit_code == 1 and "none.token: No such file" in result.stderr


def test_a_service_that_is_not_there_is_named(service: Service):
    result = service.run("nodes", "list", "--service-url", "http://127.0.0.1:9")
    assert result.exit_code == 1 and "no answer from the service at http://127.0.0.1:9" in result.stderr


def test_an_address_without_a_scheme_is_refused(service: Service):
    result = service.run("nodes", "list", "--service-url", "localhost:8470")
    assert result.exit_code == 1 and "must begin with http://" in result.stderr


def test_serve_on_a_port_in_use_says_so_and_writes_nothing(service: Service, tmp_path: Path):
    port = service.url.rsplit(":", 1)[1]
    result = service.run("serve", "--port", port, "--data-dir", str(tmp_path / "data"))
    assert result.exit_code == 1 and f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert not (tmp_path / "data" / "postgres").exists()


@pytest.mark.thorough
def test_serve_names_a_setting_of_the_environment_that_is_wrong(service: Service):
    result = service.run("serve", LIVER_SERVICE_SILENT_AFTER_S="soon")
    assert result.exit_code == 2 and "LIVER_SERVICE_SILENT_AFTER_S" in result.stderr
