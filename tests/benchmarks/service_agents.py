"""The load of the service benchmark: agents of nodes at work, which speak the agents' own protocol over HTTP.

Each has joined with its own key, keeps one connection for its reports and one for its wake stream, and reports once in
a period, and at once when it is woken. Its ranks train: every report has the steps since the last one, with losses, and
the lines of the log that belong to them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit
from uuid import UUID, uuid4

from agent.link.kept_orders import answered_of, brought, known_of, whole
from agent.link.link import AWAKE_LEAST_S
from agent.protocol.joining import JOIN_PATH, JoinRequest, NodeToken
from agent.protocol.sync import (
    CheckpointFact,
    JobOrder,
    LogChunk,
    NodeInfo,
    NoticeFact,
    NoticeKind,
    Provider,
    RankStatus,
    StepRow,
    SyncOrders,
    SyncReport,
)
from agent.protocol.wake_up import WakeEvent, WakeOrders
from liver_core.handoff import RankStage

ANSWER_S = 30.0
NAP_S = 0.02
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


class Line:
    """One HTTP connection that is kept. Raises OSError and EOFError where it breaks; the next request opens another."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, token: str, body: str = "") -> tuple[int, bytes]:
        """Status and body of the answer."""
        reader, writer = await self._open()
        try:
            async with asyncio.timeout(ANSWER_S):
                await _send(writer, method, path, token, body)
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                content = await reader.readexactly(int(length[1])) if length else b""
        except BaseException:
            self.close()
            raise
        if b"\r\nconnection: close" in head.lower():
            self.close()
        return int(head[9:12]), content

    async def events(self, path: str, token: str, take: Callable[[bytes], None]) -> None:
        """Call `take` with the data of each event of a stream, until it ends."""
        reader, writer = await self._open()
        try:
            await _send(writer, "GET", path, token, "")
            while line := await reader.readline():
                if line.startswith(b"data:"):
                    take(line.removeprefix(b"data:"))
        finally:
            self.close()

    def close(self) -> None:
        """The next request opens a new connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        return self._streams


async def _send(writer: asyncio.StreamWriter, method: str, path: str, token: str, body: str) -> None:
    content = body.encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: service\r\nAuthorization: Bearer {token}\r\n"
    if content:
        head += "Content-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()


@dataclass(slots=True)
class Watch:
    """What is measured. `syncs_ms` and `refused` of the present part of the run."""

    syncs_ms: list[float] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    noticed_at: dict[tuple[str, datetime], float] = field(default_factory=dict)
    notices_ms: list[float] = field(default_factory=list)
    asked_at: dict[str, float] = field(default_factory=dict)
    wakes_ms: list[float] = field(default_factory=list)
    order_bytes: list[int] = field(default_factory=list)
    take_orders: Callable[[BusyAgent], None] | None = None
    """Called when an agent has got new orders."""

    def begin(self) -> None:
        """Another part begins."""
        self.syncs_ms, self.refused, self.order_bytes = [], {}, []

    def refuse(self, why: str) -> None:
        """One report was not taken."""
        self.refused[why] = self.refused.get(why, 0) + 1


@contextmanager
def own_lag_ms() -> Iterator[list[float]]:
    """How late this process itself is, which plays all the agents: an answer may have lain here for so long before its
    time was taken. Measured by naps that last longer than they should, until the end of the `with`."""
    late_ms: list[float] = []

    async def nap() -> None:
        while True:
            due = time.monotonic() + NAP_S
            await asyncio.sleep(NAP_S)
            late_ms.append((time.monotonic() - due) * 1e3)

    napping = asyncio.create_task(nap())
    try:
        yield late_ms
    finally:
        napping.cancel()


@dataclass(slots=True)
class Pace:
    """How often agents report, and how fast their jobs train. Steps follow from the time: all nodes agree on them."""

    period_s: float
    steps_per_s: float
    began_s: float = field(default_factory=time.monotonic)

    def step(self) -> int:
        """The newest step."""
        return 1 + int((time.monotonic() - self.began_s) * self.steps_per_s)


class BusyAgent:
    """The agent of one node with some slots. `machine`: its id at AWS; None: it is of no cloud."""

    def __init__(
        self, node_id: str, url: str, *, slots: int, watch: Watch, pace: Pace, machine: str | None = None
    ) -> None:
        self.node_id = node_id
        self._machine = machine
        self.orders: SyncOrders | None = None
        self.is_at_work = False
        self._job: JobOrder | None = None
        self._url, self._slots, self._watch, self._pace = url, slots, watch, pace
        self._line = Line(url)
        self._token = ""
        self._incarnation: UUID = uuid4()
        self._seq = 0
        self._sent_step = 0
        self._log_chars = 0
        self._answered = 0
        self._answered_at: tuple[datetime, float] | None = None
        self._notices: list[NoticeFact] = []
        self._named: set[tuple[str, datetime]] = set()
        self._awake = asyncio.Event()
        self._brought: WakeOrders | None = None

    async def join(self, join_token: str) -> None:
        """Get a token of this node."""
        wanted = JoinRequest(node_id=self.node_id, secret=secrets.token_urlsafe(32))
        status, body = await self._line.ask("POST", JOIN_PATH, join_token, wanted.model_dump_json())
        assert status == 201, body[:500]
        self._token = NodeToken.model_validate_json(body).token

    def job(self) -> JobOrder | None:
        """The job that it works for."""
        return self._job

    def has_taken_back(self, fact: NoticeFact) -> bool:
        """Whether its orders say that the notice is withdrawn, or do not name it any more."""
        named = self._job.notices if self._job is not None else ()
        same = [item for item in named if (item.node_id, item.first_seen_utc) == (fact.node_id, fact.first_seen_utc)]
        return all(item.withdrawn_utc is not None for item in same)

    def report_notice(self) -> NoticeFact:
        """Its node will go: said at once."""
        now = datetime.now(UTC)
        fact = NoticeFact(
            node_id=self.node_id,
            kind=NoticeKind.INTERRUPTION,
            source="bench",
            deadline_utc=now + timedelta(seconds=120),
            first_seen_utc=now,
        )
        self._notices = [fact]
        self._watch.noticed_at[(self.node_id, now)] = time.monotonic()
        self._awake.set()
        return fact

    def withdraw(self, fact: NoticeFact) -> None:
        """It does not go after all: said at once."""
        self._notices = [fact.model_copy(update={"withdrawn_utc": datetime.now(UTC)})]
        self._awake.set()

    async def run(self, first_in_s: float) -> None:
        """Report until cancelled, for the first time in so many seconds."""
        due_s, began_s = time.monotonic() + first_in_s, 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                    await self._awake.wait()
            self._take_brought()
            if self._awake.is_set():
                await asyncio.sleep(max(0.0, began_s + AWAKE_LEAST_S - time.monotonic()))
            else:
                due_s = max(due_s + self._pace.period_s, time.monotonic())
            self._awake.clear()
            self._take_brought()
            began_s = time.monotonic()
            await self.sync()

    async def listen(self) -> None:
        """Follow the wake stream until cancelled."""
        line = Line(self._url)
        while True:
            with suppress(OSError, EOFError):
                await line.events(f"/agent/v1/wake?node_id={self.node_id}", self._token, self._woken)
            self._watch.refuse("wake stream ended")
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await asyncio.Event().wait()

    async def sync(self) -> None:
        """One report, and its answer taken."""
        report, notices = self._report(), self._notices
        began = time.monotonic()
        try:
            status, body = await self._line.ask("POST", "/agent/v1/sync", self._token, report.model_dump_json())
        except (OSError, EOFError) as error:
            self._watch.refuse(type(error).__name__)
            return
        self._watch.syncs_ms.append((time.monotonic() - began) * 1e3)
        self._watch.order_bytes.append(len(body))
        if status != 200:
            self._watch.refuse(f"status {status}")
            return
        if self._notices is notices:
            self._notices = []
        if report.steps:
            self._sent_step = report.steps[-1].step
        self._log_chars += sum(len(chunk.text) for chunk in report.logs)
        self._answered = max([self._answered, *(fact.asked for fact in report.checkpoints)])
        answer = SyncOrders.model_validate_json(body)
        self._answered_at = answer.issued_utc, time.monotonic()
        self.is_at_work = bool(report.ranks)
        self._take(whole(answer, self.orders))

    def _take_brought(self) -> None:
        """What a wake-up brought, as `agent.link.link` takes it: never while a report is under way."""
        orders, self._brought = self._brought, None
        taken = brought(orders, self.orders) if orders is not None else None
        if taken is not None:
            self._take(taken)

    def _take(self, orders: SyncOrders) -> None:
        if self.orders is None or orders.jobs is not self.orders.jobs:
            # A roster of a thousand is looked through once, not for each report.
            mine = (order for order in orders.jobs if order.roster and self.node_id in order.roster.node_ids())
            self._job = next(mine, None)
        self.orders = orders
        if self._watch.take_orders is not None:
            self._watch.take_orders(self)
        now, job = time.monotonic(), self._job
        for fact in job.notices if job is not None else ():
            since = self._watch.noticed_at.get((fact.node_id, fact.first_seen_utc))
            is_news = (fact.node_id, fact.first_seen_utc) not in self._named
            if fact.node_id != self.node_id and fact.withdrawn_utc is None and since is not None and is_news:
                self._named.add((fact.node_id, fact.first_seen_utc))
                self._watch.notices_ms.append((now - since) * 1e3)

    def _woken(self, event: bytes) -> None:
        self._brought = WakeEvent.model_validate_json(event).orders or self._brought
        self._awake.set()
        job = self.job()
        since = self._watch.asked_at.get(job.job_id) if job is not None else None
        if since is not None:
            self._watch.wakes_ms.append((time.monotonic() - since) * 1e3)

    def _report(self) -> SyncReport:
        self._seq += 1
        answered = answered_of(self._answered_at, time.monotonic())
        job = self.job()
        ranks, steps, logs, checkpoints = (), (), (), ()
        if job is not None and job.roster is not None:
            ranks, steps, logs, checkpoints = self._work(job)
        return SyncReport(
            agent_version="bench",
            agent_incarnation=self._incarnation,
            report_seq=self._seq,
            issued_utc=datetime.now(UTC),
            node=NodeInfo(
                node_id=self.node_id,
                provider=Provider.NONE if self._machine is None else Provider.AWS,
                provider_id=self._machine,
                slots=self._slots,
                peer_url=f"http://{self.node_id}.test:9000",
                private_address="127.0.0.1",
            ),
            notices=tuple(self._notices),
            ranks=ranks,
            steps=steps,
            logs=logs,
            checkpoints=checkpoints,
        ).model_copy(update=known_of(self.orders) | answered)

    def _work(self, job: JobOrder) -> tuple:
        """Ranks, steps, logs and checkpoints of the job."""
        assert job.roster is not None
        mine = [(rank, at.slot) for rank, at in enumerate(job.roster.members) if at.node_id == self.node_id]
        generation, now, newest = job.roster.generation, datetime.now(UTC), self._pace.step()
        seconds, is_last = 1.0 / self._pace.steps_per_s, mine[-1][0] == len(job.roster.members) - 1
        ranks = tuple(
            RankStatus(
                job_id=job.job_id, generation=generation, rank=rank, slot=slot, pid=1_000 + rank,
                stage=RankStage.TRAINING, step=newest, loss=4.5 if is_last else None, seconds=seconds,
            )
            for rank, slot in mine
        )  # fmt: skip
        first = max(self._sent_step + 1, newest - 500)
        steps = tuple(
            StepRow(
                job_id=job.job_id, generation=generation, step=step, seconds=seconds, finished_utc=now,
                loss=4.5 if is_last else None, consumed_samples=step * 24,
            )
            for step in range(first, newest + 1)
        )  # fmt: skip
        text = "".join(f"step {step} loss 4.5 of this rank, as a loop prints it\n" for step in range(first, newest + 1))
        logs = ()
        if text:
            chunk = LogChunk(
                job_id=job.job_id, generation=generation, rank=mine[0][0], offset=self._log_chars, text=text
            )
            logs = (chunk,)
        asked = job.checkpoint_asked if mine[0][0] == 0 and job.checkpoint_asked > self._answered else 0
        path = f"/checkpoints/step-{newest}"
        checkpoints = (
            (
                CheckpointFact(
                    job_id=job.job_id, generation=generation, step=newest, path=path, finished_utc=now, asked=asked
                ),
            )
            if asked
            else ()
        )
        return ranks, steps, logs, checkpoints


class Reader:
    """People and scripts who read the API, each over a connection of their own and none in step with another: the time
    until somebody's next read is drawn (exponential, seeded). `served` and `refused` count their answers."""

    PATHS = ("/api/v1/jobs?limit=20", "/api/v1/nodes?limit=20", "/api/v1/handoffs?limit=20", "/api/v1/notices?limit=20")

    def __init__(self, url: str, token: str, *, lines: int = 8) -> None:
        self.served, self.refused, self.others = 0, 0, 0
        self._lines = [Line(url) for _ in range(lines)]
        self._token = token

    async def run(self, per_s: float, for_s: float) -> None:
        """Ask so often for so long, on average and all together."""
        until = time.monotonic() + for_s
        reads = (
            self._ask(line, len(self._lines) / per_s, until, random.Random(number))
            for number, line in enumerate(self._lines)
        )
        await asyncio.gather(*reads)

    async def _ask(self, line: Line, every_s: float, until: float, chance: random.Random) -> None:
        due, number = time.monotonic() + chance.expovariate(1 / every_s), 0
        while max(due, time.monotonic()) < until:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await asyncio.Event().wait()
            due, number = due + chance.expovariate(1 / every_s), number + 1
            with suppress(OSError, EOFError):
                status, _ = await line.ask("GET", self.PATHS[number % len(self.PATHS)], self._token)
                self.served += status == 200
                self.refused += status == 429
                self.others += status not in (200, 429)


async def submit(url: str, token: str, job: dict) -> str:
    """Register a job; its id."""
    line = Line(url)
    status, body = await line.ask("POST", "/api/v1/jobs", token, json.dumps(job))
    line.close()
    assert status == 201, body[:500]
    return json.loads(body)["job_id"]
