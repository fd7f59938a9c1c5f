"""The sync loop against a real HTTP server that answers well, badly, slowly or not at all."""

import asyncio
import json
import threading
import time
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from uuid import UUID

import httpx
import pytest

from agent.link import link
from agent.link.link import AFTER_TIMEOUT_S, CALM_S, SPACING_S, LinkRefused, LinkReplaced, LinkState, ServiceLink
from agent.protocol.errors import version_problem
from agent.protocol.joining import JOIN_PATH
from agent.protocol.sync import NodeInfo, Provider, SyncOrders, SyncReport
from agent.protocol.wake_up import WakeEvent, WakeOrders
from tests.agent.waiting import eventually

INCARNATION = UUID(int=1)


class Service(ThreadingHTTPServer):
    """The two agent endpoints, told how to answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: tuple[int, str] | None = None
        self.retry_after = ""
        self.reported_at: list[float] = []
        self.hang = threading.Event()
        self.hang.set()
        self.reports: list[int] = []
        self.known: list[str] = []
        self.wake = threading.Event()
        self.wake_status = 200
        self.event = b'{"number": 2}'
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Service  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.reports.append(report["report_seq"])
        self.server.known.append(report.get("orders_known", ""))
        self.server.reported_at.append(time.monotonic())
        self.server.hang.wait(20.0)
        assert self.headers["Authorization"] == "Bearer secret"
        orders = SyncOrders(
            orders_seq=1,
            orders_digest="",
            issued_utc=datetime.now(UTC),
            accepted_incarnation=INCARNATION,
            accepted_report_seq=report["report_seq"],
            poll_s=30.0,
        )
        status, body = self.server.answer or (200, orders.model_dump_json())
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.send_response(self.server.wake_status)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if self.server.wake_status == 200 and self.server.wake.wait(20.0):
            self.wfile.write(b"event: wake\ndata: %s\n\n" % self.server.event)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.wake.set()
    server.hang.set()
    server.shutdown()
    server.server_close()


class Secret(httpx.Auth):
    """Who has joined."""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        request.headers["Authorization"] = "Bearer secret"
        yield request


class Joining(httpx.Auth):
    """Who has yet to join: what the service answers to that stands for its answer to the request."""

    def __init__(self, url: str) -> None:
        self._url = url

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        yield httpx.Request(
            "POST", self._url + JOIN_PATH, json={"report_seq": 0}, headers={"Authorization": "Bearer secret"}
        )


class Agent:
    """The two ends of a link."""

    def __init__(self, url: str, auth: httpx.Auth | None = None) -> None:
        self.orders: list[SyncOrders] = []
        self.taken_back: list[int] = []
        self.link = ServiceLink(
            service_url=url,
            auth=auth or Secret(),
            node_id="a",
            make_report=self.make_report,
            take_orders=self.take_orders,
            take_back=self.taken_back.append,
        )

    async def make_report(self, report_seq: int) -> SyncReport:
        return SyncReport(
            agent_version="0",
            agent_incarnation=INCARNATION,
            report_seq=report_seq,
            issued_utc=datetime.now(UTC),
            node=NodeInfo(
                node_id="a",
                provider=Provider.NONE,
                slots=1,
                peer_url="http://127.0.0.1:1",
                private_address="127.0.0.1",
            ),
        )

    async def take_orders(self, orders: SyncOrders) -> None:
        self.orders.append(orders)


def run_while(service_url: str, check: "object") -> None:
    async def scenario() -> None:
        agent = Agent(service_url)
        running = asyncio.create_task(agent.link.run())
        try:
            await check(agent)  # type: ignore[operator]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_reports_are_numbered_and_orders_are_taken(service: Service) -> None:
    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.orders, "orders")
        agent.link.sync_soon()
        await eventually(lambda: len(agent.orders) == 2, "orders after news")
        assert service.reports == [1, 2]
        assert agent.link.state is LinkState.CONNECTED

    run_while(service.url, check)


def test_the_wake_stream_makes_the_agent_sync_long_before_its_poll(service: Service) -> None:
    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.orders, "orders")
        service.wake.set()
        await eventually(lambda: len(agent.orders) >= 2, "orders after the wake event")

    run_while(service.url, check)


def test_an_agent_that_is_woken_some_time_after_its_last_report_fetches_its_orders_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.link.link.AWAKE_LEAST_S", 1.5)

    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.orders, "orders")
        await asyncio.sleep(1.6)
        before, began = len(agent.orders), time.monotonic()
        service.wake.set()
        await eventually(lambda: len(agent.orders) > before, "orders after the wake event")
        assert time.monotonic() - began < 1.0

    run_while(service.url, check)


def test_orders_that_a_wake_up_brings_are_taken_before_the_service_answers_the_next_report(service: Service) -> None:
    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.orders, "orders")
        orders = {"orders_seq": 2, "issued_utc": datetime.now(UTC), "orders_digest": "d2", "jobs": ()}
        service.event = WakeEvent(number=2, orders=WakeOrders.model_validate(orders)).model_dump_json().encode()
        service.hang.clear()
        service.wake.set()
        await eventually(lambda: agent.orders[-1].orders_seq == 2, "the orders of the wake-up")
        assert (agent.orders[-1].orders_digest, agent.orders[-1].accepted_report_seq) == ("d2", 1)
        await eventually(lambda: service.known[-1] == "d2", "a report that names them as known")
        assert len(agent.orders) == 2, "no report has been answered since"

    run_while(service.url, check)


def test_a_wake_up_that_cannot_be_read_makes_the_agent_sync_all_the_same(service: Service) -> None:
    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.orders, "orders")
        service.event = b'{"number": 2, "orders": "none of these"}'
        service.wake.set()
        await eventually(lambda: len(agent.orders) >= 2, "orders after the wake event")
        assert {orders.orders_seq for orders in agent.orders} == {1}

    run_while(service.url, check)


def test_progress_is_told_within_a_second_or_so_and_news_does_not_wait_for_it(service: Service) -> None:
    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.orders, "orders")
        began = time.monotonic()
        agent.link.sync_with_progress()
        await eventually(lambda: len(agent.orders) == 2, "orders after progress")
        assert time.monotonic() - began > CALM_S / 2
        began = time.monotonic()
        agent.link.sync_with_progress()
        agent.link.sync_soon()
        await eventually(lambda: len(agent.orders) == 3, "orders after news")
        assert time.monotonic() - began < CALM_S / 2 + SPACING_S

    run_while(service.url, check)


def test_a_service_that_fails_for_a_while_is_away_and_then_back(service: Service) -> None:
    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.orders, "orders")
        service.answer = (503, "starting")
        agent.link.sync_soon()
        await eventually(lambda: agent.link.state is LinkState.AWAY, "away")
        assert "503" in agent.link.reason
        service.answer = None
        await eventually(lambda: agent.link.state is LinkState.CONNECTED, "connected again")

    run_while(service.url, check)


def test_news_does_not_cut_a_backoff_short(service: Service) -> None:
    async def check(agent: Agent) -> None:
        service.answer = (503, "starting")
        await eventually(lambda: agent.link.state is LinkState.AWAY, "away")
        before = len(service.reports)
        for _ in range(5):
            agent.link.sync_soon()
            await asyncio.sleep(0.01)
        assert len(service.reports) <= before + 1

    run_while(service.url, check)


def test_a_wake_up_does_not_bring_the_next_report_at_once_where_the_last_one_got_no_answer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(link, "BACKOFF_FIRST_S", 0.01)  # Only this wait is left, and wake-ups come all the time.
    service.hang.clear()
    service.wake.set()

    async def check(agent: Agent) -> None:
        await eventually(lambda: len(service.reports) >= 3, "three reports")
        assert "ReadTimeout" in agent.link.reason
        gaps_s = [late - early for early, late in pairwise(service.reported_at)]
        assert min(gaps_s) > AFTER_TIMEOUT_S

    run_while(service.url, check)


def test_a_service_that_says_when_to_come_again_is_believed_within_bounds(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "BACKOFF_FIRST_S", 0.01)
    service.answer, service.retry_after = (503, "busy"), "1"
    service.wake.set()

    async def check(agent: Agent) -> None:
        await eventually(lambda: len(service.reports) >= 2, "two reports")
        assert service.reported_at[1] - service.reported_at[0] > 1.0
        service.retry_after = "Wed, 21 Oct 2026 07:28:00 GMT"
        await eventually(lambda: len(service.reports) >= 6, "further reports")

    run_while(service.url, check)


def test_a_service_that_is_not_there_at_all_is_away() -> None:
    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.link.state is LinkState.AWAY, "away")
        assert "ConnectError" in agent.link.reason

    run_while("http://127.0.0.1:9", check)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ((401, '{"code": "unauthenticated", "detail": "no such token"}'), "refuses the token: 401 no such token"),
        ((409, version_problem(7).model_dump_json()), "another version: the agent speaks protocol version 7"),
        ((422, '{"code": "invalid", "detail": "node.slots must be at least 1"}'), "node.slots must be at least 1"),
        ((200, '{"orders_seq": "x"}'), "the orders cannot be read: orders_seq"),
    ],
)
def test_a_refusal_of_the_first_report_ends_the_agent_with_the_reason(
    service: Service, answer: tuple[int, str], what: str
) -> None:
    service.answer = answer

    async def scenario() -> None:
        with pytest.raises(LinkRefused, match=what):
            async with asyncio.timeout(10):
                await Agent(service.url).link.run()

    asyncio.run(scenario())


def test_a_refusal_after_the_first_answer_is_reported_and_asked_again(service: Service) -> None:
    async def check(agent: Agent) -> None:
        await eventually(lambda: agent.orders, "orders")
        service.answer = (401, '{"detail": "the token was revoked"}')
        agent.link.sync_soon()
        await eventually(lambda: agent.link.state is LinkState.REFUSED, "refused")
        service.answer = None
        await eventually(lambda: agent.link.state is LinkState.CONNECTED, "connected again")

    run_while(service.url, check)


def test_an_agent_that_another_one_has_replaced_ends_even_if_ranks_need_it(service: Service) -> None:
    async def scenario() -> None:
        agent = Agent(service.url)
        agent.link.ends_on_first_refusal = False
        running = asyncio.create_task(agent.link.run())
        await eventually(lambda: agent.orders, "orders")
        service.answer = (409, '{"code": "agent-replaced", "detail": "start 1 was replaced and must end"}')
        agent.link.sync_soon()
        with pytest.raises(LinkReplaced, match="start 1 was replaced and must end; its ranks go on"):
            async with asyncio.timeout(10):
                await running

    asyncio.run(scenario())


def test_a_token_is_looked_at_before_the_first_report(service: Service) -> None:
    async def check() -> None:
        agent = Agent(service.url)
        await agent.link.check_token()
        service.wake_status = 401
        with pytest.raises(LinkRefused, match="refuses the token: 401"):
            await agent.link.check_token()
        agent.link.ends_on_first_refusal = False  # Ranks of an earlier start need this agent.
        await agent.link.check_token()
        assert service.reports == []

    asyncio.run(check())


@pytest.mark.parametrize("status", [500, 503])
def test_a_service_whose_database_is_away_when_a_node_joins_ends_no_agent(
    service: Service, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    service.answer = (status, "the database did not answer in time")
    asyncio.run(Agent(service.url, Joining(service.url)).link.check_token())
    assert f"does not answer: {status} the database did not answer in time" in caplog.text
    service.answer = (409, "node a has joined from elsewhere")
    with pytest.raises(LinkRefused, match="does not let this node join: 409"):
        asyncio.run(Agent(service.url, Joining(service.url)).link.check_token())


def test_a_service_that_is_away_is_named_by_its_address_and_refuses_nobody(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(Agent("http://127.0.0.1:9").link.check_token())
    assert "service http://127.0.0.1:9 does not answer" in caplog.text


@pytest.mark.parametrize(("status", "taken_back"), [(413, [1]), (422, [1]), (401, []), (503, [])])
def test_a_report_that_is_refused_for_what_it_holds_is_taken_back(service: Service, status: int, taken_back: list[int]):
    async def once() -> list[int]:
        agent = Agent(service.url)
        with pytest.raises((LinkRefused, link.ServiceAway)):
            await agent.link.sync()
        return agent.taken_back

    service.answer = (status, "{}")
    assert asyncio.run(once()) == taken_back
