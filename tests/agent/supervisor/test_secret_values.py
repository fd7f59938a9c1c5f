"""What a job's environment refers to is read on the node, from allowed places only, and its value is never repeated."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent.protocol.jobfile import JobFile
from agent.protocol.jobfile_check import JobFileError, check_job_file
from agent.protocol.secret_values import SECRET_BYTES_MAX, SecretError, SecretPlaces, environment_of
from agent.settings import SettingsError, secret_places
from tests.agent.supervisor.test_supervisor import node
from tests.agent.waiting import eventually, fake_job, quick_directory

VALUE = "hunter2-hunter2"


def job(environment: dict[str, Any]) -> JobFile:
    fields = fake_job(Path("/nowhere")).model_dump(mode="json", exclude_none=True)
    return check_job_file(fields | {"environment": environment})


def refused(environment: dict[str, Any], places: SecretPlaces, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SecretError) as caught:
        environment_of(job(environment), places, environ or {})
    assert VALUE not in str(caught.value)
    return str(caught.value)


def test_references_are_resolved_beside_plain_text(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text(VALUE + "\n\n")
    given = {"A": {"from_file": str(tmp_path / "wandb")}, "B": {"from_env": "HF_TOKEN"}, "C": "plain", "D": 1}
    places = SecretPlaces((tmp_path,), ("HF_*",))
    found = environment_of(job(given), places, {"HF_TOKEN": "t"})
    assert found == {"A": VALUE + "\n", "B": "t", "C": "plain", "D": "1"}


def test_a_file_outside_the_allowed_folders_is_refused_also_behind_a_link(tmp_path: Path) -> None:
    inside = tmp_path / "allowed"
    inside.mkdir()
    (tmp_path / "token").write_text(VALUE)
    (inside / "link").symlink_to(tmp_path / "token")
    for path in (tmp_path / "token", inside / "link", inside / ".." / "token"):
        text = refused({"K": {"from_file": str(path)}}, SecretPlaces((inside,)))
        assert text.startswith(f"environment.K: from_file {path}: lies in no folder that --job-secrets-dir")
    assert "lies in no folder" in refused({"K": {"from_file": str(tmp_path / "token")}}, SecretPlaces())


def test_a_link_within_an_allowed_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "key").write_text(VALUE)
    (tmp_path / "key").symlink_to("..data/key")
    given = {"K": {"from_file": str(tmp_path / "key")}}
    assert environment_of(job(given), SecretPlaces((tmp_path,)), {}) == {"K": VALUE}


def test_a_file_that_cannot_be_a_value_is_refused_with_the_rule(tmp_path: Path) -> None:
    for content, rule in (
        (VALUE.encode() + b"\0", "must not contain a NUL"),
        (VALUE.encode() + b"\xff", "must be text in UTF-8"),
        (VALUE.encode() * SECRET_BYTES_MAX, f"must have at most {SECRET_BYTES_MAX} bytes"),
    ):
        (tmp_path / "file").write_bytes(content)
        assert rule in refused({"K": {"from_file": str(tmp_path / "file")}}, SecretPlaces((tmp_path,)))
    os.mkfifo(tmp_path / "pipe")
    assert "must be a plain file" in refused({"K": {"from_file": str(tmp_path / "pipe")}}, SecretPlaces((tmp_path,)))
    assert "No such file" in refused({"K": {"from_file": str(tmp_path / "none")}}, SecretPlaces((tmp_path,)))


def test_only_allowed_variables_of_the_agent_are_given_and_never_its_own() -> None:
    environ = {"HF_TOKEN": "t", "DATABASE_PASSWORD": VALUE, "LIVER_TOKEN": VALUE}
    places = SecretPlaces((), ("HF_TOKEN", "LIVER_*", "GONE"))
    for name, rule in (
        ("DATABASE_PASSWORD", "--job-secrets-env of the agent does not allow it"),
        ("HF_TOKEN_2", "--job-secrets-env of the agent does not allow it"),
        ("LIVER_TOKEN", "--job-secrets-env of the agent does not allow it"),
        ("GONE", "is not set on this node"),
    ):
        assert refused({"K": {"from_env": name}}, places, environ) == f"environment.K: from_env {name}: {rule}"


@pytest.mark.parametrize(
    "reference",
    [{}, {"from_file": "/a", "from_env": "A"}, {"from_file": "a"}, {"from_env": "A-B"}, {"from_elsewhere": "hunter2"}],
)
def test_a_reference_names_exactly_one_place(reference: dict[str, str]) -> None:
    with pytest.raises(JobFileError) as caught:
        job({"K": reference})
    assert all(problem.field.startswith("environment.K") for problem in caught.value.problems)
    assert "hunter2" not in str(caught.value) and "(reference)" not in str(caught.value)


def test_plain_values_of_names_that_say_secret_are_hidden_and_others_are_shown() -> None:
    plain = {"WANDB_API_KEY": VALUE, "HF_TOKEN": VALUE, "DB_PASSWORD": VALUE, "S3_SECRET": VALUE}
    shown = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    file = job(plain | shown | {"MY_KEY": {"from_env": "MY_KEY"}})
    assert file.plain_secrets() == tuple(plain)
    seen = file.without_secrets().model_dump(mode="json", exclude_none=True)["environment"]
    assert seen == dict.fromkeys(plain, "(hidden)") | shown | {"MY_KEY": {"from_env": "MY_KEY"}}
    assert file.environment["HF_TOKEN"] == VALUE, "ranks get what was given"


def test_options_that_allow_secrets_are_checked(tmp_path: Path) -> None:
    assert secret_places(f"{tmp_path}, /", "A, HF_*") == SecretPlaces((tmp_path, Path("/")), ("A", "HF_*"))
    with pytest.raises(SettingsError, match="--job-secrets-dir run must be the whole path of a folder"):
        secret_places("run", "")
    with pytest.raises(SettingsError, match=r"--job-secrets-env 'A-B' must be the name of a variable"):
        secret_places("", "A-B")


def test_a_rank_gets_the_value_and_no_file_of_the_agent_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", VALUE)
    run_dir = quick_directory()

    async def scenario() -> None:
        async with node(run_dir, places=SecretPlaces((), ("HF_TOKEN",))) as this:
            spec = this.spec()
            file = spec.spec.model_copy(update={"environment": job({"GIVEN": {"from_env": "HF_TOKEN"}}).environment})
            state = await this.supervisor.launch(spec.model_copy(update={"spec": file}), "o")
            await eventually(lambda: state.hello_received, "the hello")
            assert VALUE in memory_of(state.record.process.pid)
            written = [path for path in run_dir.rglob("*") if path.is_file()]
            assert {"journal.jsonl", "zygote.log"} <= {path.name for path in written}
            assert not [path for path in written if VALUE.encode() in path.read_bytes()]
            assert VALUE not in "".join(psutil.Process(state.record.process.pid).cmdline())
            with pytest.raises(SecretError, match=r"environment\.GIVEN: from_env OTHER"):
                other = file.model_copy(update={"environment": job({"GIVEN": {"from_env": "OTHER"}}).environment})
                await this.supervisor.launch(
                    spec.model_copy(update={"spec": other, "slot": 1, "order": spec.order}), "o2"
                )

    try:
        asyncio.run(scenario())
    finally:
        shutil.rmtree(run_dir)


def memory_of(pid: int) -> str:
    """The readable and writable memory of a process: `putenv` changes nothing in /proc/PID/environ."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights = line.split()[:2]
            if rights.startswith("rw"):
                start, end = (int(part, 16) for part in span.split("-"))
                memory.seek(start)
                found.append(memory.read(min(end - start, 64 * 1024 * 1024)).decode(errors="replace"))
    return "".join(found)
