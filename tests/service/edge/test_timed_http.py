"""Connections that promise a request and never send one, and TLS: against a real server."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from agent.link.identity import NodeAuth
from agent.link.link import ServiceAway, ServiceLink
from agent.protocol.errors import PROBLEM_MEDIA_TYPE
from agent.protocol.sync import SyncOrders, SyncReport
from agent.settings import SettingsError, check_tls_ca
from service import server as serving
from service.cli.main import app as liver
from service.db.engine import StartError
from service.edge.gate import BODY_S_MAX
from service.edge.timed_http import HEAD_BYTES_MAX, TimedHttpProtocol
from service.server import announcement, bind
from service.settings import ServiceSettings
from tests.service.conftest import bearer
from tests.service.fake_agent import FakeAgent

HEAD_S = 0.4
LEAST_S = HEAD_S - 0.01
"""The server's loop counts in whole milliseconds."""


class Hasty(TimedHttpProtocol):
    head_s_max = HEAD_S


@contextlib.contextmanager
def served(app, **options) -> Iterator[int]:
    """The port of the application behind a real server."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", http=Hasty, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def ended_after(port: int, *sent: bytes, within_s: float = 8.0) -> float:
    """Seconds until the service ends a connection on which these pieces come, one each tenth of a second."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.1)
        pieces = list(sent)
        while time.monotonic() - began < within_s:
            try:
                if pieces:
                    connection.sendall(pieces.pop(0))
                if connection.recv(4_096) == b"" and not pieces:
                    return time.monotonic() - began
            except TimeoutError:
                continue
            except OSError:
                return time.monotonic() - began
    raise AssertionError(f"the connection was still open after {within_s} s")


def test_a_connection_without_a_whole_head_is_closed(client):
    with served(client.app) as port:
        assert ended_after(port) >= LEAST_S
        assert ended_after(port, b"GET /healthz HTTP/1.1\r\nHo") >= LEAST_S
        # However often bytes come.
        assert LEAST_S <= ended_after(port, b"GET /", *[b"a"] * 70) < 6
        request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        assert LEAST_S <= ended_after(port, request, b"GET /", *[b"a"] * 70) < 6


def test_half_open_connections_keep_nobody_out(client):
    with served(client.app) as port, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=10).status_code == 200


@pytest.mark.thorough
def test_a_slow_request_is_not_ended_by_the_limit_on_heads(client, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("service.leases.endpoints.current_prices", lambda *_, **__: ended.wait(3 * HEAD_S) or [])
    with served(client.app) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/pools/prices", headers=client.headers, timeout=10)
    assert (answer.status_code, answer.json()) == (200, [])


def test_a_large_body_without_a_token_is_answered_before_it_is_sent(client):
    head = b"PUT /api/v1/pools/x/price HTTP/1.1\r\nHost: x\r\nContent-Length: 314572800\r\n\r\n"
    with served(client.app) as port, socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head)
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"content-type: application/problem+json" in answer


def test_one_connection_gets_one_answer_where_a_body_has_two_lengths(client):
    both = b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    with served(client.app) as port:
        assert answers(port, both + smuggled) == [b"400"]


def test_what_is_no_request_is_a_problem_too(client):
    heads = [b"GET / HTTP/1.1\r\nHost: x\r\nA: \x7f\r\n\r\n", b"GET /" + b"a" * (HEAD_BYTES_MAX + 1)]
    with served(client.app) as port:
        for head in heads:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(head)
                answer = http.client.HTTPResponse(connection)
                answer.begin()
                problem = json.loads(answer.read())
            assert (answer.status, answer.headers["content-type"]) == (400, PROBLEM_MEDIA_TYPE)
            assert (problem["status"], problem["code"]) == (400, "invalid") and problem["detail"]
            wanted = {"connection": "close", "x-content-type-options": "nosniff", "cache-control": "no-store"}
            assert wanted == {name: answer.headers[name] for name in wanted}


def answers(port: int, *pieces: bytes) -> list[bytes]:
    """The statuses of all answers to what is sent in pieces; the last request closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, contextlib.suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
        while part := connection.recv(65_536):
            answer += part
    return re.findall(rb"HTTP/1.1 (\d+)", answer)


@pytest.mark.parametrize("fold", [b"\r\n b", b"\r\n\tb", b"\n b", b"\r\n  \t b"])
def test_a_header_that_goes_on_in_another_line_is_refused(client, fold):
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    folded = head + b"Authorization: Bearer a" + fold + b"\r\n\r\n"
    whole = head + b"Connection: close\r\n\r\n"
    body = b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n\r\n a: b\r\n"
    with served(client.app) as port:
        assert answers(port, folded) == [b"400"]
        # Nothing comes after what is refused, since the answer may be lost where bytes meet a closed connection.
        known = head + b"Authorization: Bearer a" + (fold[:3] if fold.startswith(b"\r") else fold[:1])
        assert answers(port, *[known[i : i + 1] for i in range(len(known))]) == [b"400"]
        assert answers(port, head + b"\r\n" + folded) == [b"200", b"400"], "the second on one connection"
        found = answers(port, body + whole)
        assert found[-1] == b"200" and b"400" not in found, "a body may have such lines"


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
@pytest.mark.parametrize(("before", "piece"), [(b"GET /", b"a"), (b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: ", b"b")])
def test_a_head_that_is_too_large_is_refused_whole_or_not(client, before, piece, end):
    fits = before + piece * (HEAD_BYTES_MAX - 200)
    rest = (
        b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" if before == b"GET /" else b"\r\nConnection: close\r\n\r\n"
    )
    with served(client.app) as port:
        assert answers(port, fits, rest) != [b"400"], "this one fits"
        assert answers(port, before + piece * (HEAD_BYTES_MAX + 1) + end) == [b"400"]
        many = [piece * 4_000 for _ in range(9)]
        assert answers(port, before, *many) == [b"400"]
        asked = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        assert answers(port, asked + before + piece * 400_000) == [b"200", b"400"], "more than is read at once"


def test_what_counts_of_a_head_is_not_counted_for_the_next_one(client):
    first = b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (HEAD_BYTES_MAX - 1_000) + b"\r\n\r\n"
    pieces = [b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: ", b"b" * 3_000, b"\r\nConnection: close\r\n\r\n"]
    with served(client.app) as port, socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(first)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
        for piece in pieces[:-1]:
            connection.sendall(piece)
            connection.settimeout(HEAD_S / 10)
            with pytest.raises(TimeoutError):
                connection.recv(65_536)
        connection.settimeout(10)
        connection.sendall(pieces[-1])
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("hosts", [b"", b"Host: a\r\nHost: b\r\n"])
def test_a_request_without_one_host_is_refused(client, hosts):
    with served(client.app) as port:
        assert answers(port, b"GET /healthz HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n") == [b"400"]
        assert answers(port, b"GET /healthz HTTP/1.0\r\n\r\n") == [b"200"]


def test_white_space_around_a_value_is_none_of_it(client):
    said = b"POST /api/v1/session HTTP/1.1\r\nHost:x \r\nContent-Length:\t2 \t\r\nConnection: close \r\n\r\n{}"
    with served(client.app) as port:
        assert answers(port, said) == [b"422"]


def test_a_head_that_is_refused_is_answered_behind_the_requests_before_it(client, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("service.leases.endpoints.current_prices", lambda *_, **__: ended.wait(HEAD_S / 2) or [])
    token = client.headers["Authorization"].encode()
    slow = b"GET /api/v1/pools/prices HTTP/1.1\r\nHost: x\r\nAuthorization: " + token + b"\r\n\r\n"
    with served(client.app) as port:
        assert answers(port, slow + slow + b"GET /healthz HTTP/1.1\r\nHo st: x\r\n\r\n") == [b"200", b"200", b"400"]


def test_a_body_that_is_not_in_the_form_that_it_announces_is_refused_at_once(client):
    head = b"POST /api/v1/session HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(client.app) as port:
        began = time.monotonic()
        assert answers(port, head + b"2\r\nabcd\r\n") == [b"400"]
        assert time.monotonic() - began < BODY_S_MAX / 2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=liver-test", "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


@pytest.mark.thorough
def test_service_command_and_agent_speak_tls_with_a_certificate_that_they_trust(
    client, settings, certificate, clock, tmp_path
):
    chain, key = certificate
    with served(client.app, ssl_certfile=chain, ssl_keyfile=key) as port:
        url = f"https://127.0.0.1:{port}"
        environment = {"LIVER_SERVICE_URL": url, "LIVER_TOKEN_FILE": str(settings.data_dir / "tokens/operator.token")}
        told = CliRunner().invoke(liver, ["--tls-ca", str(chain), "nodes", "list", "--json"], env=environment)
        assert (told.exit_code, told.stdout.strip()) == (0, "[]"), told.output
        untold = CliRunner().invoke(liver, ["nodes", "list"], env=environment)
        assert untold.exit_code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in untold.output.replace("\n", "")
        agent = FakeAgent("a", client, bearer(settings, "join"), clock)
        assert asyncio.run(one_sync(url, agent, str(chain), tmp_path)).jobs == ()
        with pytest.raises(ServiceAway, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(one_sync(url, agent, None, tmp_path))


async def one_sync(url: str, agent: FakeAgent, tls_ca: str | None, run_dir: Path) -> SyncOrders:
    async def make_report(_seq: int) -> SyncReport:
        return agent.report()

    async def take_orders(_orders: SyncOrders) -> None: ...

    join = agent.join["Authorization"].removeprefix("Bearer ")
    link = ServiceLink(
        service_url=url,
        auth=NodeAuth(url, node_id=agent.node_id, join_token=join, run_dir=run_dir),
        tls_ca=tls_ca,
        node_id=agent.node_id,
        make_report=make_report,
        take_orders=take_orders,
    )
    return await link.sync()


def test_files_that_hold_no_certificate_are_named_at_the_start(tmp_path, certificate):
    chain, key = certificate
    none = tmp_path / "none.pem"
    none.write_text("no certificate")
    for wrong in ((none, key), (chain, none), (chain, tmp_path / "absent")):
        files = {"tls_certificate": wrong[0], "tls_key": wrong[1]}
        with pytest.raises(StartError, match=f"--tls-certificate {wrong[0]} with --tls-key {wrong[1]} cannot be used"):
            serving.serve(ServiceSettings(data_dir=tmp_path, port=0, **files))
    with pytest.raises(SettingsError, match=f"--tls-ca {none} cannot be used"):
        check_tls_ca(str(none))
    told = CliRunner().invoke(liver, ["--tls-ca", str(none), "nodes", "list", "--service-url", "https://127.0.0.1:9"])
    assert told.exit_code == 1
    alone = CliRunner().invoke(liver, ["serve", "--tls-key", str(key), "--data-dir", str(tmp_path)])
    assert (alone.exit_code, "come together" in alone.output) == (2, True)
    assert announcement("https://a:1", tmp_path)[0] == "service: https://a:1"
