"""The running service: start errors that name their cause, streams that wake, a clean end."""

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import datetime

import httpx
import pytest
import uvicorn
from sqlalchemy import text

from agent.link.kept_orders import brought
from agent.protocol.wake_up import WakeEvent
from service import server as serve
from service.app import create_app
from service.context import utc_now
from service.db import engine
from service.db.engine import StartError, open_database
from service.jobs.grants import follow_members
from service.jobs.tables import MemberRole
from service.server import bind
from service.settings import ServiceSettings
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB, FakeAgent, step_row
from tests.tiers import sample


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


def test_nothing_is_started_when_the_port_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "create_app", lambda *_: pytest.fail("the application was made"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartError, match="in use"):
            serve.serve(ServiceSettings(data_dir=tmp_path, port=taken.getsockname()[1]))


def test_threads_that_answer_get_the_interpreter_soon_while_another_computes(tmp_path, monkeypatch):
    seen: list[float] = []

    def create(*_: object, **__: object) -> None:
        seen.append(sys.getswitchinterval())
        raise StartError("this is far enough")

    monkeypatch.setattr(serve, "create_app", create)
    usual_s = sys.getswitchinterval()
    with pytest.raises(StartError, match="far enough"):
        serve.serve(ServiceSettings(data_dir=tmp_path, port=0))
    assert seen == [pytest.approx(0.001)]
    assert sys.getswitchinterval() == usual_s, "a process that goes on has its own again"


@pytest.mark.thorough
def test_a_collection_of_garbage_does_not_look_through_all_that_the_service_has_loaded(tmp_path, monkeypatch):
    """Nobody is answered during one: over 200,000 objects take more than 100 ms."""
    seen: list[int] = []

    def run(server: uvicorn.Server, *, sockets: list[socket.socket]) -> None:
        seen.append(len(gc.get_objects()))
        assert gc.get_threshold() == serve.COLLECTS_AFTER

    usual = gc.get_threshold()
    monkeypatch.setattr(uvicorn.Server, "run", run)
    serve.serve(ServiceSettings(data_dir=tmp_path, port=0))
    assert seen[0] < 10_000, "objects that a full collection looks at as the service begins to serve"
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, usual), "a process that goes on collects as before"


def test_only_token_files_that_are_there_are_announced(tmp_path):
    """Of two services on one database, one makes the first tokens."""
    assert serve.announcement("http://a:1", tmp_path) == ("service: http://a:1",)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "join.token").write_text("x")
    announced = serve.announcement("http://a:1", tmp_path)
    assert [line.split()[-1] for line in announced[1:]] == [str(tmp_path / "tokens" / "join.token")]


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StartError, match=f"data directory {blocked / 'data'} cannot be written"):
        open_database(ServiceSettings(data_dir=blocked / "data"))


def test_a_full_disk_is_refused_with_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "DISK_FREE_BYTES_MIN", 2**62)
    with pytest.raises(StartError, match=r"has \d+ MiB free, at least \d+ MiB are needed"):
        open_database(ServiceSettings(data_dir=tmp_path))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "postgresql://liver:secret@127.0.0.1:9/liver",
            r"database postgresql\+psycopg://liver:\*\*\*@127.0.0.1:9/liver ",
        ),
        ("sqlite:///x.db", "only postgresql is supported"),
        ("nonsense", "must look like postgresql://"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_without_its_password(tmp_path, url, message):
    with pytest.raises(StartError, match=message) as caught:
        open_database(ServiceSettings(data_dir=tmp_path, database_url=url))
    assert "secret" not in str(caught.value)


@contextmanager
def served(settings, database):
    """The application on a free port of loopback, with its reconcilers."""
    listener = bind("127.0.0.1", 0)
    app = create_app(settings, database=database)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
    app.state.context.hub.end_streams_with(lambda: server.should_exit)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


def test_a_job_starts_by_itself_and_agents_are_woken_at_once(tmp_path, database):
    settings = ServiceSettings(data_dir=tmp_path)
    with served(settings, database) as url:
        with httpx.Client(base_url=url, headers=bearer(settings, "operator"), timeout=10) as client:
            clock = utc_now
            agents = [FakeAgent(name, client, bearer(settings, "join"), clock) for name in ("a", "b")]
            for agent in agents:
                agent.sync()
            stream = client.stream("GET", "/agent/v1/wake", params={"node_id": "a"}, headers=agents[0].headers)
            with stream as events:
                lines = sse(events)
                assert next(lines) == ("wake", {"number": 0})
                job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
                begun = time.monotonic()
                name, event = next(lines)
                woken_s = time.monotonic() - begun
            assert (name, event) == ("wake", {"number": 1})
            assert woken_s < 5
            order = agents[0].sync().jobs[0]
            assert (order.generation, str(agents[0].roster().layout)) == (1, "TP2xPP1xDP1")
            with client.stream("GET", f"/api/v1/jobs/{job_id}/watch") as events:
                lines = sse(events)
                assert next(lines)[1]["job"]["state"] == "starting"
                agents[0].sync(
                    ranks=(agents[0].rank(order, step=1),), steps=(step_row(job_id, 1, 1, clock(), loss=5.5),)
                )
                seen = next(event for _, event in lines if event["steps"])
                assert seen["steps"][0]["loss"] == 5.5


def test_a_members_stream_brings_the_orders_that_name_a_notice_of_another_one(tmp_path, database):
    settings = ServiceSettings(data_dir=tmp_path)
    with served(settings, database) as url, httpx.Client(base_url=url, timeout=10) as client:
        first, second = (FakeAgent(name, client, bearer(settings, "join"), utc_now) for name in ("a", "b"))
        for agent in (first, second):
            agent.sync()
        client.post("/api/v1/jobs", json=JOB, headers=bearer(settings, "operator"))
        ends_at = time.monotonic() + 30
        while not all(agent.sync().jobs for agent in (first, second)):
            assert time.monotonic() < ends_at, "the job was not ordered within 30 s"
        with client.stream("GET", "/agent/v1/wake?node_id=b", headers=second.headers) as events:
            lines = sse(events)
            assert next(lines) == ("wake", {"number": 0})
            fact = first.notice()
            first.sync(notices=(fact,))
            while not second.job_order().notices:
                event = WakeEvent.model_validate(next(lines)[1], strict=False)
                if event.orders is not None:
                    second.orders = brought(event.orders, second.orders) or second.orders
        assert second.job_order().notices == (fact,)
        assert second.job_order().roster is not None, "which the event left out"


def test_reports_that_time_out_at_a_locked_job_do_not_pile_up_behind_it(tmp_path, database):
    settings = ServiceSettings(data_dir=tmp_path, reconcilers=False)
    with served(settings, database) as url, httpx.Client(base_url=url, timeout=10) as client:
        job_id = client.post("/api/v1/jobs", json=JOB, headers=bearer(settings, "operator")).json()["job_id"]
        agent = FakeAgent("a", client, bearer(settings, "join"), utc_now)
        agent.sync()
        with database.sessions.begin() as session:
            follow_members(session, job_id, given={"a": MemberRole.MEMBER}, taken=(), now=utc_now())
        steps = {"steps": (step_row(job_id, 1, 1, utc_now()),)}
        with database.engine.begin() as holder:
            holder.execute(text("SELECT 1 FROM jobs FOR UPDATE"))
            client.timeout = httpx.Timeout(0.3)
            for _ in range(6):
                with pytest.raises(httpx.ReadTimeout):
                    agent.post(agent.report(**steps))
            with database.engine.connect() as other:
                waiting = other.execute(
                    text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
                ).scalar_one()
            assert waiting == 1, "its first report, whose transaction had begun"
            client.timeout = httpx.Timeout(10)
            with ThreadPoolExecutor(2) as pool:
                older, newer = (pool.submit(agent.post, agent.report(**steps)) for _ in range(2))
                first, _ = wait((older, newer), timeout=10, return_when=FIRST_COMPLETED)
                refused = first.pop().result()
                assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
                assert refused.json()["detail"] == "a newer report of node a waits for its turn"
                holder.rollback()
                assert {older.result().status_code, newer.result().status_code} == {200, 503}
        assert agent.sync().accepted_report_seq == agent.seq


def sse(response: httpx.Response):
    """Events of a stream as (name, data)."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("number", sample([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_service_that_is_asked_to_end_ends_with_status_0(tmp_path, number):
    command = [sys.executable, "-m", "service.cli.main", "serve"]
    errors = tmp_path / "errors"
    service = subprocess.Popen(
        [*command, "--data-dir", str(tmp_path / "data"), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=errors.open("w"),
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert service.stdout is not None
        assert "service: http://127.0.0.1:" in service.stdout.readline(), errors.read_text()
        service.send_signal(number)
        assert service.wait(30) == 0
        # What happens is logged, a line each, with time, level and place.
        pattern = r"^(\S+ \S+) INFO service\.server: liver \S+ serves http://127\.0\.0\.1:\d+$"
        line = re.search(pattern, errors.read_text(), re.MULTILINE)
        assert line is not None, errors.read_text()
        assert datetime.strptime(line[1], "%Y-%m-%d %H:%M:%S,%f")
    finally:
        service.kill()
        service.wait()


@pytest.mark.thorough
def test_systemd_hears_that_the_service_is_ready_and_alive(tmp_path):
    command = [sys.executable, "-m", "service.cli.main", "serve", "--data-dir", str(tmp_path / "data"), "--port", "0"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(40)
        environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        service = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            heard = [manager.recv(1_000).decode().splitlines()[0] for _ in range(3)]
            assert heard == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
            service.terminate()
            assert service.wait(30) == 0
        finally:
            service.kill()
            service.wait()
