"""`liver jobs export` up to the process that has torch; a shell script plays it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

from service.cli.main import app
from tests.service.cli.test_try_job import interpreter

MADE = {"folder": "/x", "source": "/y", "iteration": 7, "consumed_samples": 56, "flags": ["--bf16"], "remarks": []}


def attempt(source: Path | str, python: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["jobs", "export", str(source), "--to", "made", "--python", str(python), *options])


def plays(folder: Path, said: str, status: int = 0) -> Path:
    """An interpreter that notes what it is started with and answers so."""
    return interpreter(folder, does=f"echo \"$@\" > {folder}/started\necho '{said}'\nexit {status}")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for name in ("step-000000003", "step-000000012", "step-000000015.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(("options", "name"), [((), "step-000000012"), (("--step", "3"), "step-000000003")])
def test_of_a_folder_of_checkpoints_the_newest_or_the_named_one_is_taken(
    tmp_path: Path, checkpoints: Path, options: tuple[str, ...], name: str
):
    done = attempt(checkpoints, plays(tmp_path, json.dumps(MADE)), *options)
    assert done.exit_code == 0, done.output
    assert "iteration 7, 56 samples" in done.stdout and "pretrain_gpt.py --load /x --bf16" in done.stdout
    started = (tmp_path / "started").read_text().split()
    assert started[-2:] == [f"{checkpoints}/{name}", str(Path.cwd() / "made")]


def checkpoints_of(*steps: int, **changes: object) -> list[dict[str, object]]:
    """As the service lists those of a job, the newest first."""
    whole = {"damage": None, "left_behind": False}
    return [{"step": step, "path": f"/elsewhere/step-{step:09d}"} | whole | changes for step in steps]


def answered(monkeypatch: pytest.MonkeyPatch, listed: list[dict[str, object]]) -> None:
    """A service that has one job, with these checkpoints."""
    job = {"job_id": "demo-1a2b", "name": "demo", "state": "running", "checkpoints": listed}
    answers = {"/api/v1/jobs": [job], "/api/v1/jobs/demo-1a2b": job, "/api/v1/jobs/demo-1a2b/checkpoints": listed}
    client = SimpleNamespace(get=lambda path, **_: answers[path], listed=lambda path, **_: answers[path])
    monkeypatch.setattr("service.cli.jobs.connect", lambda *_: client)


def test_of_a_damaged_checkpoint_the_steps_are_named_that_are_not_and_none_is_taken_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answered(monkeypatch, [*checkpoints_of(12, damage="cut off"), *checkpoints_of(7, 3)])
    for options in ((), ("--step", "12")):
        done = attempt("demo", tmp_path / "never", *options)
        assert done.exit_code == 1
        assert "step 12 is damaged: cut off; --step takes another one: 3, 7" in done.stderr
    assert attempt("demo", plays(tmp_path, json.dumps(MADE)), "--step", "7").exit_code == 0


def test_the_newest_checkpoint_of_a_job_that_went_back_is_none_that_it_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answered(monkeypatch, [*checkpoints_of(12, left_behind=True), *checkpoints_of(7)])
    assert attempt("demo", plays(tmp_path, json.dumps(MADE))).exit_code == 0
    assert (tmp_path / "started").read_text().split()[-2] == "/elsewhere/step-000000007"


def test_where_the_files_show_the_damage_the_steps_beside_it_are_named(tmp_path: Path, checkpoints: Path):
    python = plays(tmp_path, '{"error": "checkpoint x: a.distcp has 1 of 2 bytes", "damaged": true}', status=1)
    done = attempt(checkpoints, python)
    assert done.exit_code == 1
    assert "1 of 2 bytes; it is damaged, and --step takes another one: 3\n" in done.stderr


@pytest.mark.parametrize(("options", "name"), [((), "step-000000012"), (("--step", "3"), "step-000000003")])
def test_of_a_job_the_checkpoints_are_those_that_the_service_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], name: str
):
    listed = checkpoints_of(12, 3)
    answered(monkeypatch, listed)
    done = attempt("demo", plays(tmp_path, json.dumps(MADE)), *options)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "started").read_text().split()[-2] == f"/elsewhere/{name}"
    missing = attempt("demo", tmp_path / "never", "--step", "9")
    assert "--step 9: job demo-1a2b has checkpoints of these steps: 3, 12" in missing.stderr


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path, checkpoints: Path):
    done = attempt(checkpoints, tmp_path / "never", "--step", "9")
    assert done.exit_code == 1
    assert f"--step 9: {checkpoints} has checkpoints of these steps: 3, 12" in done.stderr
    done = attempt(checkpoints / "step-000000003", tmp_path / "never", "--step", "3")
    assert "is not a folder with checkpoints step-N" in done.stderr


def test_without_torch_one_sentence_says_what_to_install(tmp_path: Path, checkpoints: Path):
    done = attempt(checkpoints, interpreter(tmp_path, lacks="torch"))
    assert done.exit_code == 1
    assert "has no torch: install it with pip install './liver_handoff-" in done.stderr and "--python" in done.stderr


def test_what_is_wrong_with_the_checkpoint_is_passed_on(tmp_path: Path, checkpoints: Path):
    done = attempt(checkpoints, plays(tmp_path, '{"error": "common.pt is missing"}', status=1))
    assert (done.exit_code, done.stderr) == (1, "error: common.pt is missing\n")
    assert "the export ended with status 3" in attempt(checkpoints, plays(tmp_path, "oh", status=3)).stderr
    assert f"--python: {tmp_path}/gone does not run" in attempt(checkpoints, tmp_path / "gone").stderr
