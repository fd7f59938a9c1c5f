"""People's reads: few at a time, agents first, and nobody is kept out by one that lasts."""

import asyncio
import itertools
import time
from contextlib import AsyncExitStack, ExitStack

import httpx
import pytest
from sqlalchemy import delete, insert, text, update
from sqlalchemy.orm import Session, sessionmaker

from service.db.engine import OnlyReadsError
from service.db.outage import Outage
from service.edge import gate
from service.edge.budgets import CALLERS_MAX, Shown
from service.lanes import FOR_MANY, READERS_AT_ONCE, WAITING_OF_ONE_MAX, YIELDS_S, Lane, Readers
from service.nodes.tables import NodeRow
from service.problems import ProblemError
from service.settings import ServiceSettings
from service.tokens.operations import Caller
from service.tokens.tables import Role
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB
from tests.service.sync.test_cost import statements
from tests.service.test_serve import served


def a_lane() -> Lane:
    sessions: sessionmaker[Session] = sessionmaker()
    return Lane(sessions, sessions, places=4, wait_s=1.0, whose="agents", outage=Outage())


def some_readers(agents: Lane, *, at_once: int = READERS_AT_ONCE, outage: Outage | None = None) -> Readers:
    return Readers(agents, outage=outage or Outage(), at_once=at_once, wait_s=0.01)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_read_begins_once_no_agent_is_served_any_more():
    async def run() -> list[str]:
        agents, order = a_lane(), []
        readers = some_readers(agents)

        async def read() -> None:
            end = await readers.begin("a")
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


def test_work_for_many_finds_a_place_beside_any_number_that_work_for_one_caller():
    async def run() -> int:
        lane = Lane(sessionmaker(), sessionmaker(), places=5, wait_s=0.01, whose="agents", outage=Outage())
        async with AsyncExitStack() as crowd:
            refused = 0
            for _ in range(4):
                try:
                    await crowd.enter_async_context(lane.place(alone=True))
                except ProblemError as error:
                    refused += error.problem.status == 503
            for _ in range(FOR_MANY):
                await crowd.enter_async_context(lane.place())
            with pytest.raises(ProblemError):
                async with lane.place():
                    pass
        async with AsyncExitStack() as again:
            for _ in range(5 - FOR_MANY):
                await again.enter_async_context(lane.place(alone=True))
        return refused

    assert asyncio.run(run()) == 4 - (5 - FOR_MANY)


def test_a_read_begins_after_a_moment_where_agents_are_served_all_the_time():
    async def run() -> float:
        agents = a_lane()
        async with agents.place():
            asked = time.monotonic()
            (await some_readers(agents).begin("a"))()
            return time.monotonic() - asked

    assert YIELDS_S * 0.9 <= asyncio.run(run()) < 100 * YIELDS_S


def test_so_many_read_at_a_time_and_whoever_waits_too_long_is_refused():
    async def run() -> None:
        readers = some_readers(a_lane(), at_once=2)
        first, _second = await readers.begin("a"), await readers.begin("b")
        with pytest.raises(ProblemError) as refused:
            await readers.begin("c")
        assert refused.value.problem.status == 503
        assert refused.value.problem.detail == "too many requests of people and scripts at a time; try again"
        first()
        first()
        await readers.begin("a")
        with pytest.raises(ProblemError):
            await readers.begin("a")

    asyncio.run(run())


def test_who_is_cancelled_while_agents_are_served_gives_the_turn_back():
    async def run() -> None:
        agents = a_lane()
        readers = some_readers(agents, at_once=1)
        async with agents.place():
            waiting = [asyncio.create_task(readers.begin("a")) for _ in range(WAITING_OF_ONE_MAX)]
            await settle()
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await readers.begin("a")

    asyncio.run(run())


def test_all_who_read_wait_for_agents_together_and_none_of_them_while_it_has_a_turn():
    class Counting(Lane):
        waiting = 0

        async def quiet(self, within_s: float) -> None:
            self.waiting += 1
            await super().quiet(60 * within_s)

    async def run() -> int:
        sessions: sessionmaker[Session] = sessionmaker()
        agents = Counting(sessions, sessions, places=4, wait_s=1.0, whose="agents", outage=Outage())
        readers = some_readers(agents, at_once=1)
        async with agents.place():
            begun = [asyncio.create_task(readers.begin(name)) for name in ("a", "b", "c")]
            await settle()
            waiting = agents.waiting
        for first in asyncio.as_completed(begun):
            (await first)()
            break
        await asyncio.gather(*begun, return_exceptions=True)
        return waiting

    assert asyncio.run(run()) == 3


def test_so_many_reads_of_one_token_wait_and_the_next_turns_are_for_others():
    async def run() -> list[str]:
        readers, order = Readers(a_lane(), outage=Outage(), at_once=1, wait_s=10.0), []

        async def read(name: str) -> None:
            end = await readers.begin(name)
            order.append(name)
            end()

        end = await readers.begin("script")
        reads = [asyncio.create_task(read("script")) for _ in range(WAITING_OF_ONE_MAX)]
        await settle()
        with pytest.raises(ProblemError) as refused:
            await readers.begin("script")
        assert (refused.value.problem.status, refused.value.headers) == (429, {"Retry-After": "1"})
        reads.append(asyncio.create_task(read("console")))
        await settle()
        end()
        await asyncio.gather(*reads)
        await read("script")
        return order

    assert asyncio.run(run()) == ["script"] * WAITING_OF_ONE_MAX + ["console", "script"]


@pytest.mark.parametrize("reads", [True, False])
def test_who_gets_no_place_while_the_database_is_away_is_told_so(reads):
    async def run() -> str:
        outage = Outage()
        outage.begins(ConnectionError("gone"))
        sessions: sessionmaker[Session] = sessionmaker()
        lane = Lane(sessions, sessions, places=1, wait_s=0.01, whose="people", outage=outage)
        readers = some_readers(a_lane(), at_once=1, outage=outage)
        await readers.begin("a")
        async with lane.place():
            with pytest.raises(ProblemError) as refused:
                if reads:
                    await readers.begin("b")
                else:
                    await lane.run(print)
        return refused.value.problem.detail

    changed = "" if reads else "nothing was changed, "
    assert asyncio.run(run()) == f"the database does not answer; {changed}try again"


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


def test_what_was_shown_longest_ago_is_forgotten_when_there_is_very_much():
    shown, caller = Shown(), Caller("a", Role.VIEWER, "a")
    for number in itertools.chain(range(CALLERS_MAX), (0, CALLERS_MAX)):
        shown.note(f"token {number}", caller)
    assert [shown.caller_of(f"token {number}") for number in (0, 1, CALLERS_MAX)] == [caller, None, caller]
    shown.forget("token 0")
    assert shown.caller_of("token 0") is None


def test_a_session_that_only_reads_begins_no_transaction_and_writes_nothing(make_agent, context):
    make_agent("a").sync()
    for sessions in (context.agents.reading, context.people.reading):
        with sessions() as session:
            row = session.get_one(NodeRow, "a")
            taken = session.connection().connection.driver_connection
            assert taken is not None and taken.info.transaction_status.name == "IDLE"
            row.pool = "another"
            with pytest.raises(OnlyReadsError, match="only reads"):
                session.flush()
            session.expire(row)
            written = text("WITH a AS (Update nodes SET pool = 'another' RETURNING 1) SELECT * FROM a")
            for statement in (insert(NodeRow), update(NodeRow).values(pool="another"), delete(NodeRow), written):
                with pytest.raises(OnlyReadsError, match="only reads"):
                    session.execute(statement)
            assert session.execute(text("SELECT 'updated', current_date")).one()
    with context.sessions() as session:
        assert session.get_one(NodeRow, "a").pool == "spot-a"
        held = session.connection().connection.driver_connection
        session.execute(text("SELECT 1"))
        assert held is not None and held.info.transaction_status.name == "INTRANS"
