"""People's reads: few at a time, agents first, and nobody is kept out by one that lasts."""

import asyncio
import time
from contextlib import ExitStack

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from service.edge import gate
from service.edge.budgets import CALLERS_MAX, OverBudget
from service.lanes import READERS_AT_ONCE, YIELDS_S, Lane, Readers
from service.nodes.tables import NodeRow
from service.problems import ProblemError
from service.settings import ServiceSettings
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB
from tests.service.sync.test_cost import statements
from tests.service.test_serve import served


def a_lane() -> Lane:
    sessions: sessionmaker[Session] = sessionmaker()
    return Lane(sessions, sessions, places=4, wait_s=1.0, whose="agents")


def test_a_read_begins_once_no_agent_is_served_any_more():
    async def run() -> list[str]:
        agents, order = a_lane(), []
        readers = Readers(agents)

        async def read() -> None:
            end = await readers.begin()
            order.append("read")
            end()

        async with agents.place():
            reader = asyncio.create_task(read())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            order.append("agent")
        await reader
        return order

    assert asyncio.run(run()) == ["agent", "read"]


def test_a_read_begins_after_a_moment_where_agents_are_served_all_the_time():
    async def run() -> float:
        agents = a_lane()
        async with agents.place():
            asked = time.monotonic()
            (await Readers(agents).begin())()
            return time.monotonic() - asked

    assert YIELDS_S * 0.9 <= asyncio.run(run()) < 100 * YIELDS_S


def test_so_many_read_at_a_time_and_whoever_waits_too_long_is_refused():
    async def run() -> None:
        readers = Readers(a_lane(), at_once=2, wait_s=0.01)
        first, _second = await readers.begin(), await readers.begin()
        with pytest.raises(ProblemError) as refused:
            await readers.begin()
        assert refused.value.problem.status == 503
        first()
        first()
        await readers.begin()
        with pytest.raises(ProblemError):
            await readers.begin()

    asyncio.run(run())


def test_who_is_cancelled_while_agents_are_served_gives_the_turn_back():
    async def run() -> None:
        agents = a_lane()
        readers = Readers(agents, at_once=1, wait_s=0.01)
        async with agents.place():
            waiting = asyncio.create_task(readers.begin())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await readers.begin()

    asyncio.run(run())


def test_streams_keep_nobody_from_reading(tmp_path, database):
    settings = ServiceSettings(data_dir=tmp_path, reconcilers=False)
    with served(settings, database) as url, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=url, headers=bearer(settings, "operator"), timeout=10))
        job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
        for _ in range(READERS_AT_ONCE + 1):
            stream = stack.enter_context(client.stream("GET", f"/api/v1/jobs/{job_id}/watch"))
            assert stream.status_code == 200
        assert client.get("/api/v1/jobs").status_code == 200
        assert client.get("/api/v1/jobs/none").status_code == 404
        assert client.get("/api/v1/none").status_code == 404


def test_a_token_that_has_no_request_left_is_refused_without_another_look_at_whose_it_is(
    client, context, settings, monkeypatch
):
    now = [1_000.0]
    monkeypatch.setattr(gate, "monotonic", lambda: now[0])

    def ask(headers: dict[str, str] | None = None) -> int:
        return client.get("/api/v1/session", headers=headers).status_code

    while ask() == 200:
        pass
    with statements(context) as seen:
        answers = [client.get("/api/v1/session") for _ in range(3)]
        assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(429, "1")}
        assert seen == []
        wrong = {"Authorization": client.headers["Authorization"] + "x"}
        assert ask(wrong) == 401, "only who has shown the token before learns that it has none left"
    now[0] += 1.5 / settings.requests_per_s
    assert [ask(), ask()] == [200, 429], "one more, and it is counted once"


def test_a_refusal_ends_the_connection_only_where_a_body_was_not_read(client):
    for method, headers, closes in (("GET", {}, False), ("POST", {"Content-Length": "3"}, True)):
        refused = client.request(method, "/api/v1/jobs", headers={"Authorization": "Bearer x", **headers})
        assert refused.status_code == 401
        assert (refused.headers.get("connection") == "close") is closes


def test_callers_without_a_request_left_are_forgotten_when_there_are_very_many():
    spent = OverBudget()
    for number in range(CALLERS_MAX + 1):
        spent.note(f"token {number}", str(number))
    assert spent.caller_of("token 0") is None
    assert spent.caller_of(f"token {CALLERS_MAX}") == str(CALLERS_MAX)
    spent.forget(f"token {CALLERS_MAX}")
    assert spent.caller_of(f"token {CALLERS_MAX}") is None


def test_a_session_that_only_reads_begins_no_transaction_and_writes_nothing(make_agent, context):
    make_agent("a").sync()
    for sessions in (context.agents.reading, context.people.reading):
        with sessions() as session:
            row = session.get_one(NodeRow, "a")
            taken = session.connection().connection.driver_connection
            assert taken is not None and taken.info.transaction_status.name == "IDLE"
            row.pool = "another"
            with pytest.raises(AssertionError, match="only reads"):
                session.flush()
    with context.sessions() as session:
        assert session.get_one(NodeRow, "a").pool == "spot-a"
        held = session.connection().connection.driver_connection
        session.execute(text("SELECT 1"))
        assert held is not None and held.info.transaction_status.name == "INTRANS"
