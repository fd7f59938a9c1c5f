"""The gate before all routes: token, size and budget come before the body; every answer is problem+json."""

import asyncio
import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable
from urllib.parse import unquote

import pytest
from psycopg import Error as PsycopgError
from sqlalchemy import text
from sqlalchemy.exc import DataError, OperationalError

from agent.protocol.errors import PROBLEM_MEDIA_TYPE
from agent.protocol.sync import REPORT_BYTES_MAX
from service.context import Context
from service.edge import gate
from service.edge.budgets import CALLERS_MAX, Buckets
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB

LARGE = {"content-length": str(300 * 1024 * 1024), "content-type": "application/json"}


class Wire:
    """One request spoken to the application itself: what is read of its body is counted, and what is sent is kept."""

    def __init__(self, app, method: str, path: str, headers: dict[str, str], version: str = "1.1") -> None:
        self.parts: list[dict] = []
        self.read = 0
        self.waits = False
        """For a part of the body that does not come."""
        self.status, self.headers, self.body = 0, {}, b""
        self._app = app
        headers = {"host": "test"} | headers
        self._scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "server": ("test", 80), "client": ("1.2.3.4", 5), "state": {},
            "http_version": version, "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip

    def run(self) -> "Wire":
        asyncio.run(self.answer())
        return self

    async def answer(self) -> None:
        async with asyncio.timeout(20):
            await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict:
        self.read += 1
        if not self.parts:
            self.waits = True
            await asyncio.Event().wait()
        return self.parts.pop(0)

    async def _send(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")

    def problem(self) -> dict:
        assert self.headers["content-type"] == PROBLEM_MEDIA_TYPE
        return json.loads(self.body)


@pytest.mark.parametrize("path", ["/api/v1/pools/x/price", "/api/v1/none", "/agent/v1/sync"])
def test_without_a_token_no_byte_of_a_body_is_read(client, path):
    wire = Wire(client.app, "PUT", path, LARGE).run()
    assert (wire.status, wire.read) == (401, 0)
    assert wire.problem()["code"] == "unauthenticated"
    assert wire.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("role", "method", "path", "limit"),
    [
        ("operator", "PUT", "/api/v1/pools/x/price", gate.BODY_BYTES_MAX),
        ("operator", "POST", "/api/v1/jobs", 1024 * 1024),
        ("node", "POST", "/agent/v1/sync", REPORT_BYTES_MAX),
        (None, "POST", "/api/v1/session", gate.BODY_BYTES_MAX),
    ],
)
def test_a_body_that_is_too_large_is_refused_before_it_is_read_or_at_the_limit(
    client, settings, make_agent, role, method, path, limit
):
    found = make_agent("a").headers if role == "node" else bearer(settings, role) if role else {}
    headers = {name.lower(): value for name, value in found.items()}
    wire = Wire(client.app, method, path, headers | LARGE).run()
    assert (wire.status, wire.read) == (413, 0)
    assert wire.problem()["detail"] == f"a request to this address may have at most {limit} bytes"
    wire = Wire(client.app, method, path, headers | {"content-type": "application/json"})
    wire.parts = [{"type": "http.request", "body": b"x" * limit, "more_body": True}] * 9
    wire.run()
    assert (wire.status, wire.read, wire.problem()["code"]) == (413, 2, "too-large")


def test_a_body_that_does_not_come_ends_the_request(client, make_agent, monkeypatch):
    monkeypatch.setattr(gate, "BODY_S_MAX", 0.05)
    headers = {"authorization": make_agent("a").headers["Authorization"]}
    wire = Wire(client.app, "POST", "/agent/v1/sync", headers)
    wire.parts = [{"type": "http.request", "body": b"{", "more_body": True}]
    wire.run()
    assert (wire.status, wire.problem()["code"]) == (408, "too-late")


def test_bodies_that_do_not_come_keep_no_place_from_others(client, settings, context):
    headers = {name.lower(): value for name, value in bearer(settings, "admin").items()}
    headers["content-type"] = "application/json"
    described = client.get("/api/v1/openapi.json").json()["paths"]
    takes_body = [
        (method.upper(), re.sub(r"\{\w+\}", "x", path))
        for path, ways in described.items()
        for method, way in ways.items()
        if "requestBody" in way and path.startswith("/api/")
    ]
    assert {("POST", "/api/v1/jobs"), ("PATCH", "/api/v1/jobs/x")} < set(takes_body)

    wires = []
    for method, path in takes_body:
        wires.append(Wire(client.app, method, path, headers))
        wires[-1].parts = [{"type": "http.request", "body": b"{", "more_body": True}]
    asyncio.run(no_place_is_taken(context, wires, lambda: all(wire.waits for wire in wires)))


async def no_place_is_taken(
    context: Context, wires: list[Wire], is_so: Callable[[], bool], go_on: Callable[[], None] = lambda: None
) -> None:
    """Asserts that others get all places of people once it is so, while these are under way."""
    tasks = [asyncio.create_task(wire.answer()) for wire in wires]
    try:
        async with asyncio.timeout(20):
            while not is_so():  # noqa: ASYNC110 - what it waits for happens in other threads too
                await asyncio.sleep(0.01)
        async with contextlib.AsyncExitStack() as places:
            for _ in range(context.database.readers_max):
                await places.enter_async_context(context.people.place())
    finally:
        go_on()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("method", "path", "module", "body"),
    [
        ("POST", "/api/v1/jobs", "jobs", {}),
        ("PATCH", "/api/v1/jobs/x", "jobs", {}),
        ("POST", "/api/v1/what-if", "what_if", {"job_file": "{}", "builtin": "own-24h"}),
    ],
)
def test_job_files_are_read_without_a_place(client, context, monkeypatch, method, path, module, body):
    begun, goes_on = threading.Event(), threading.Event()

    def slow(_text: bytes) -> object:
        begun.set()
        goes_on.wait(20)
        return {}

    monkeypatch.setattr(f"service.{module}.endpoints.read_fields", slow)
    headers = {"content-type": "application/json", "authorization": client.headers["Authorization"]}
    wire = Wire(client.app, method, path, headers)
    wire.parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    asyncio.run(no_place_is_taken(context, [wire], begun.is_set, goes_on.set))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/v1/jobs"),
        ("PATCH", "/api/v1/jobs/x"),
        ("PUT", "/api/v1/pools/x/price"),
        ("POST", "/agent/v1/sync"),
    ],
)
def test_a_client_that_goes_before_its_body_came_is_no_error(client, make_agent, caplog, method, path):
    found = make_agent("a").headers if path.startswith("/agent") else client.headers
    wire = Wire(client.app, method, path, {"authorization": found["Authorization"], "content-type": "application/json"})
    wire.parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    wire.run()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_every_answer_tells_browsers_to_take_it_as_what_it_is_and_those_of_the_api_not_to_keep_it(client):
    of_api = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
    token = {"authorization": client.headers["Authorization"]}
    for path, headers in (
        ("/api/v1/jobs", token),
        ("/api/v1/jobs", {}),
        ("/api/v1/none", token),
        ("/agent/v1/sync", {}),
    ):
        wire = Wire(client.app, "GET", path, headers).run()
        assert of_api.items() <= wire.headers.items() and "strict-transport-security" not in wire.headers
    for path in ("/healthz", "/login", "/none.js"):
        assert client.get(path).headers["x-content-type-options"] == "nosniff"
    for scheme in ("https", "http"):
        found = client.get(f"{scheme}://test/healthz").headers.get("strict-transport-security")
        assert found == ("max-age=31536000" if scheme == "https" else None)


@pytest.mark.parametrize(
    ("headers", "version", "detail"),
    [
        (
            {"content-length": "3", "transfer-encoding": "chunked"},
            "1.1",
            "Content-Length and Transfer-Encoding may not come together",
        ),
        ({}, "9.9", "HTTP/9.9 is not spoken here; use HTTP/1.1"),
    ],
)
def test_what_two_readers_of_one_connection_may_take_differently_ends_it(client, headers, version, detail):
    wire = Wire(client.app, "GET", "/healthz", headers, version).run()
    assert (wire.status, wire.problem()["detail"], wire.headers["connection"]) == (400, detail, "close")


def test_who_asks_too_often_is_told_when_to_come_again_and_agents_do_not_feel_it(
    client, settings, make_agent, monkeypatch
):
    now = [1_000.0]
    monkeypatch.setattr(gate, "monotonic", lambda: now[0])
    answers = [client.get("/api/v1/pools/prices") for _ in range(int(2 * settings.requests_per_s) + 1)]
    assert {answer.status_code for answer in answers[:-1]} == {200}
    late = answers[-1]
    assert (late.status_code, late.headers["content-type"]) == (429, PROBLEM_MEDIA_TYPE)
    assert (late.json()["code"], late.headers["retry-after"]) == ("too-many-requests", "1")
    assert client.get("/api/v1/jobs", headers=bearer(settings, "admin")).status_code == 200
    make_agent("a").sync()
    now[0] += 1
    assert client.get("/api/v1/pools/prices").status_code == 200


def test_a_bucket_fills_again_and_no_further_than_its_burst():
    buckets = Buckets(per_s=10.0, burst=2.0)
    assert [buckets.wait_s("x", now_s=0.0) for _ in range(2)] == [0.0, 0.0]
    assert buckets.wait_s("x", now_s=0.0) == pytest.approx(0.1)
    assert buckets.wait_s("y", now_s=0.0) == 0.0
    assert buckets.wait_s("x", now_s=0.05) == pytest.approx(0.05)
    assert [buckets.wait_s("x", now_s=9.0) for _ in range(2)] == [0.0, 0.0]
    assert buckets.wait_s("x", now_s=9.0) > 0.0
    assert buckets.wait_s("x", now_s=8.0) > 0.0


def test_buckets_of_very_many_callers_are_forgotten():
    buckets = Buckets(per_s=1.0, burst=1.0)
    for number in range(CALLERS_MAX + 5):
        buckets.wait_s(str(number), now_s=0.0)
    assert buckets.wait_s("0", now_s=0.0) == 0.0
    assert buckets.wait_s(str(CALLERS_MAX), now_s=0.0) > 0.0


@pytest.mark.parametrize("error", [RuntimeError("boom"), "statement"])
def test_an_error_that_nobody_expected_is_a_problem_with_the_id_that_the_log_has(client, caplog, monkeypatch, error):
    def broken(session, **_) -> None:
        if isinstance(error, Exception):
            raise error
        session.execute(text("SELECT CAST(:key AS bigint)"), {"key": "a" + " secret"})

    monkeypatch.setattr("service.leases.endpoints.current_prices", broken)
    answer = client.get("/api/v1/pools/prices")
    assert (answer.status_code, answer.headers["content-type"]) == (500, PROBLEM_MEDIA_TYPE)
    problem_id = answer.json()["detail"].split()[9].rstrip(";")
    assert f"problem {problem_id}: GET /api/v1/pools/prices failed" in caplog.text
    assert "a secret" not in caplog.text


def test_no_value_of_a_statement_is_in_its_error(context):
    secret = "a secret of a job"
    for statement in ("SELECT 1 / (length(:it) - 17)", "SELECT CAST(:it AS bigint)", "SELECT CAST(:it AS jsonb)"):
        with context.sessions() as session, pytest.raises(DataError) as raised:
            session.execute(text(statement), {"it": secret})
        shown = "".join(map(str, (raised.value, raised.value.orig, raised.value.__cause__)))
        assert "SELECT" in shown and secret not in shown


def test_a_token_that_cannot_be_looked_up_while_the_database_is_away_is_no_error_of_the_service(client, monkeypatch):
    async def find(*_):
        raise OperationalError("SELECT 1", {}, PsycopgError("the database system is starting up"))

    monkeypatch.setattr(gate, "find_caller", find)
    wire = Wire(client.app, "POST", "/agent/v1/sync", {"authorization": "Bearer liver_a_x"}).run()
    assert (wire.status, wire.headers["retry-after"], wire.problem()["code"]) == (503, "2", "unavailable")


@pytest.mark.parametrize("token", ["liver_%00_x", "liver_%F0%9F%98%80_x", "liver_" + "a" * 900 + "_x", "%FF"])
def test_a_token_that_no_database_can_hold_is_a_wrong_token(client, token):
    answer = client.post("/api/v1/session", json={"token": unquote(token, errors="replace")})
    assert answer.status_code in (401, 422)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/jobs/%00", 422),
        ("/api/v1/jobs/a%20b/steps", 422),
        ("/api/v1/nodes/%00", 422),
        ("/api/v1/jobs?match=%00", 422),
        ("/api/v1/handoffs?match=%00", 422),
        ("/api/v1/handoffs?job_id=%00", 422),
        ("/api/v1/handoffs/%00", 404),
        ("/api/v1/ledger?job_id=%00", 422),
        ("/api/v1/ledger?since=0001-01-01T00:00:00%2B14:00", 422),
        ("/api/v1/ledger?until=9999-12-31T23:59:59-14:00", 422),
        ("/api/v1/jobs/a/steps?after=9223372036854775808", 422),
        ("/api/v1/jobs/a/logs?after=9223372036854775808", 422),
        ("/api/v1/jobs/a/logs?rank=9223372036854775808", 422),
        ("/api/v1/none", 404),
    ],
)
def test_an_address_that_no_column_takes_is_refused_by_name(client, path, status):
    answer = client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, PROBLEM_MEDIA_TYPE)


@pytest.mark.parametrize(
    "effective_from",
    ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2100-01-01T00:00:00Z", 0, "1e9", "NaN"],
)
def test_a_price_from_a_time_that_nobody_can_read_back_is_refused(client, effective_from):
    price = {"price_usd_per_hour": 1.0, "effective_from": effective_from}
    answer = client.put("/api/v1/pools/x/price", json=price)
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["effective_from"]
    assert client.get("/api/v1/pools/prices").json() == []


@pytest.mark.parametrize(
    "content",
    [
        b'{"price_usd_per_hour": NaN}',
        b'{"price_usd_per_hour": 1e999}',
        b'{"price_usd_per_hour": "1"}',
        b'{"price_usd_per_hour": 1, "\\ud800": 1}',
        b'{"a":' * 5_000,
        b"\xff\xfe",
        b"{",
        b"",
    ],
)
def test_a_body_that_is_no_price_is_422(client, content):
    answer = client.put("/api/v1/pools/x/price", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM_MEDIA_TYPE)


@pytest.mark.parametrize("body", [{"steps": "5"}, {"steps": 2**70}, {"steps": True}, {"stop": 1}])
def test_a_wrong_number_of_steps_is_422(client, body):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    assert client.post(f"/api/v1/jobs/{job_id}/resume", json=body).status_code == 422
