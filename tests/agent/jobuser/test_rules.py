"""What must hold before an agent runs jobs as another user, what that user gets of its environment, and its change."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.supervisor.job_user import JobUser, JobUserError, environment_for_jobs, find_job_user
from agent.supervisor.process import is_alive
from tests.agent.cluster import ROOT
from tests.agent.supervisor.test_supervisor import KEY, Node, text_of
from tests.agent.waiting import eventually, quick_directory

RUN = "tests.agent.fake_rank:run"


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user may enter."""
    path = quick_directory()
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def start(through: tuple[str, ...], folder: Path, name: str) -> str:
    """What an agent says whose settings are refused."""
    command = [*through, sys.executable, "-m", "agent.main", "--service-url", "http://127.0.0.1:9", "--node-id", "a"]
    command += ["--token-file", str(folder / "token"), "--run-dir", str(folder / "run"), "--job-user", name]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


def test_a_user_that_is_not_there_or_is_root_is_refused(job_user: pwd.struct_passwd, folder: Path) -> None:
    (folder / "token").write_text("join-token")
    assert "--job-user: there is no user 'nobody-knows' on this machine" in start((), folder, "nobody-knows")
    assert "--job-user: root must not be root" in start((), folder, "root")


def test_an_agent_that_is_not_root_cannot_have_a_job_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)
    with pytest.raises(JobUserError, match="only an agent that runs as root"):
        find_job_user("nobody")


def test_what_the_user_could_read_of_the_agent_is_named(
    job_user: pwd.struct_passwd, through: tuple[str, ...], folder: Path
) -> None:
    token, run = folder / "token", folder / "run"
    token.write_text("join-token")
    token.chmod(0o644)
    assert f"--job-user: {job_user.pw_name} can read {token}; it must be closed" in start(through, folder, "nobody")
    token.chmod(0o600)
    shutil.rmtree(run)
    run.mkdir()
    run.chmod(0o755)
    assert f"--job-user: {job_user.pw_name} can read {run}; it must be closed" in start(through, folder, "nobody")


def test_a_place_that_the_agent_imports_from_and_the_user_can_change_is_named(
    job_user: pwd.struct_passwd, through: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "token").write_text("join-token")
    (folder / "token").chmod(0o600)
    code = folder / "code"
    code.mkdir()
    os.chown(code, job_user.pw_uid, job_user.pw_gid)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(code))))
    assert f"nobody can change {code}, from which the agent runs code as root" in start(through, folder, "nobody")


def test_a_new_run_directory_is_closed(job_user: pwd.struct_passwd, through: tuple[str, ...], folder: Path) -> None:
    (folder / "token").write_text("join-token")
    start(through, folder, "nobody-knows")
    assert (folder / "run").stat().st_mode & 0o777 == 0o700


def test_a_job_gets_of_the_agents_environment_only_how_to_compute() -> None:
    agent = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "LC_ALL": "C", "PYTHONPATH": "/code"}
    secret = {"LIVER_AGENT_TOKEN_FILE": "/t", "AWS_SECRET_ACCESS_KEY": "s", "DATABASE_URL": "d", "SSH_AUTH_SOCK": "x"}
    assert environment_for_jobs(agent | secret) == agent


def test_the_user_survives_the_way_to_the_zygote() -> None:
    user = JobUser("trainer", 1_000, 1_001, (1_001, 44), "/home/trainer")
    assert JobUser.parse(user.to_text()) == user


def test_a_zygote_of_another_user_is_replaced_and_its_ranks_run_on(job_user: pwd.struct_passwd) -> None:
    user = find_job_user(job_user.pw_name)

    async def scenario(run_dir: Path) -> None:
        first = Node(run_dir, RUN, "tests.agent.fake_rank")
        older = await first.supervisor.launch(first.spec(), "o")
        await eventually(lambda: older.hello_received, "the hello")
        before = (await first.zygote.ensure()).identity
        await first.leave()
        second = Node(run_dir, RUN, "tests.agent.fake_rank", user)
        second.supervisor.adopt()
        try:
            assert (await second.zygote.ensure()).identity != before and not is_alive(before)
            assert is_alive(older.record.process), text_of(older.record.log_path)
            await second.supervisor.stop(KEY, "its place is needed", grace_s=5.0)
            newer = await second.supervisor.launch(second.spec(), "o2")
            await eventually(lambda: newer.pulse.step > 2, "steps of the user's rank")
            pid = newer.record.process.pid
            assert os.stat(f"/proc/{pid}").st_uid == user.uid
            assert os.stat(newer.record.log_path).st_uid == user.uid
            assert os.stat(f"/proc/{(await second.zygote.ensure()).identity.pid}").st_uid == 0
        finally:
            await second.end()

    run_dir = quick_directory()
    os.chown(run_dir, user.uid, user.gid)  # Fake ranks agree in a file there; what they need not reach is closed.
    try:
        asyncio.run(scenario(run_dir))
    finally:
        shutil.rmtree(run_dir)
