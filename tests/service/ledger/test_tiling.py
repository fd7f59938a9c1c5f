"""Whatever comes: leased slot time has one cause each moment, and costs what its pool cost then."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text

from agent.protocol.sync import HandoffMeasures, HandoffMirror, JobOrder, StepRow
from liver_core.layout import ParallelLayout
from service.jobs.operations import touch
from service.jobs.tables import JobRow
from service.leases.tables import LeaseRow, PoolPriceRow
from service.ledger import sums
from service.ledger.operations import LEAST_S
from service.ledger.sums import hour_of
from service.ledger.tables import IntervalRow
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow, NodeState
from service.reconcilers import jobs
from tests.service.fake_agent import JOB, FakeAgent, mirror, roster

EXAMPLES = 40
TABLES = "jobs, nodes, capacity_requests, pool_prices, ledger_egress, ledger_sums"
CENT = Decimal("0.01")
MICRO = timedelta(microseconds=1)
NODES, POOLS = ("a", "b"), ("spot-a", "spot-b")
seconds = st.integers(1, 90_000_000).map(lambda micros: micros / 1e6)
moments = st.integers(0, 20_000_000_000)
events = st.one_of(
    st.tuples(st.just("report"), st.sampled_from(NODES), seconds, st.booleans()),
    st.tuples(st.just("train"), seconds, st.integers(1, 7)),
    st.tuples(st.just("replay"), st.sampled_from(NODES)),
    st.tuples(st.just("leave"), st.sampled_from(NODES), seconds),
    st.tuples(st.just("resize"), st.sampled_from(NODES), st.integers(1, 3), st.sampled_from(POOLS)),
    st.tuples(st.just("pause"), st.sampled_from(NODES), seconds),
    st.tuples(st.just("price"), st.sampled_from(POOLS), st.integers(0, 99_999), st.integers(-9_000, 0)),
    st.tuples(st.just("roll"), st.booleans()),
    st.tuples(st.just("wait"), st.integers(1, 9_000)),
)


@dataclass
class History:
    """Two nodes whose first slots work for one job, and what truly happened. `made`: the steps, and which of them a
    node has still to report."""

    client: Any
    context: Any
    clock: Any
    agents: dict[str, FakeAgent]
    make_agent: Callable[..., FakeAgent]
    world: HandoffMirror
    order: JobOrder
    started_at: datetime
    step: int = 0
    made: list[tuple[datetime, datetime]] = field(default_factory=list)
    said: dict[str, list[StepRow]] = field(default_factory=lambda: {name: [] for name in NODES})
    last: dict[str, Any] = field(default_factory=dict)
    charged: float = 0.0
    charges: int = 0

    def report(self, name: str, after_s: float, works: bool) -> None:
        self.clock.advance(after_s)
        self.send(name, works=works)

    def send(self, name: str, *, works: bool = True) -> None:
        agent = self.agents[name]
        rank = agent.rank(self.order, step=self.step)
        steps, self.said[name] = self.said[name], []
        report = agent.report(ranks=(rank,) if works else (), steps=tuple(steps))
        self.last[name] = report
        assert agent.post(report).status_code == 200

    def train(self, for_s: float, steps: int) -> None:
        """The ranks make steps, of which nobody hears for now."""
        for _ in range(steps):
            self.step += 1
            start, took_s = self.clock(), round(for_s / steps, 6) or 1e-6
            self.clock.advance(took_s)
            self.made.append((start, self.clock()))
            row = StepRow(
                job_id=self.order.job_id, generation=2, step=self.step, seconds=took_s, finished_utc=self.clock()
            )
            for name in NODES:
                self.said[name].append(row)

    def replay(self, name: str) -> None:
        if name in self.last:
            self.agents[name].post(self.last[name])

    def leave(self, name: str, after_s: float) -> None:
        self.clock.advance(after_s)
        with self.context.sessions.begin() as session:
            node = session.get_one(NodeRow, name)
            if node.state != NodeState.GONE:
                mark_gone(session, node, reason="test", now=self.clock())
                # As the reconciler does: the orders of its jobs name it no more.
                touch(session, session.get_one(JobRow, self.order.job_id), now=self.clock())

    def resize(self, name: str, slots: int, pool: str) -> None:
        self.agents[name] = self.make_agent(name, slots=slots, pool=pool)
        self.send(name)

    def pause(self, name: str, pause_s: float) -> None:
        """A handoff that was reported active before is measured anew, longer: what is more is charged, also to nodes
        that are gone since. No pause is longer than the job has run."""
        measures = HandoffMeasures(pause_s=(self.world.measures.pause_s or 0.0) + pause_s)
        if measures.pause_s > (self.clock() - self.started_at).total_seconds():
            return
        update = {"mirror_seq": self.world.mirror_seq + 1, "measures": measures}
        self.world = self.world.model_copy(update=update)
        answer = self.agents[name].post(self.agents[name].report(handoffs=(self.world,)))
        assert answer.status_code == 200 and answer.json()["refusals"] == []
        self.charged += pause_s * len(NODES)
        self.charges += len(NODES)

    def price(self, pool: str, mills: int, at_s: int) -> None:
        body = {
            "price_usd_per_hour": mills / 1_000,
            "effective_from": (self.clock() + timedelta(seconds=at_s, microseconds=137)).isoformat(),
        }
        assert self.client.put(f"/api/v1/pools/{pool}/price", json=body).status_code == 200

    def wait(self, for_s: int) -> None:
        """Hours pass: sums are cut by hour."""
        self.clock.advance(for_s)

    def roll(self, merges: bool) -> None:
        """All intervals that have ended go into the sums, three at a time."""
        for _ in range(1_000):
            with self.context.sessions.begin() as session:
                if not sums.roll(session, before=self.clock() + MICRO, hours_max=3):
                    break
        if merges:
            with self.context.sessions.begin() as session:
                sums.merge(session)

    def check(self, *spans: tuple[datetime | None, datetime | None]) -> None:
        with self.context.sessions() as session:
            leases = session.scalars(select(LeaseRow).order_by(LeaseRow.lease_id)).all()
            rows = session.scalars(select(IntervalRow).order_by(IntervalRow.starts_at)).all()
            prices = session.scalars(select(PoolPriceRow).order_by(PoolPriceRow.effective_from)).all()
        leased = timedelta()
        for lease in leases:
            for slot in range(lease.slots):
                at = lease.started_at
                for row in (row for row in rows if (row.lease_id, row.slot) == (lease.lease_id, slot)):
                    assert row.starts_at == at < row.ends_at, "no gap and no overlap"
                    at = row.ends_at
                assert lease.ended_at in (None, at)
                leased += at - lease.started_at
            others = [other for other in leases if other.node_id == lease.node_id and other.lease_id > lease.lease_id]
            assert all(lease.ended_at is not None and other.started_at >= lease.ended_at for other in others)
        ledger = self.client.get("/api/v1/ledger").json()
        assert round(Decimal(ledger["slot_seconds"]) * 10**6) == leased // MICRO
        by_id = {lease.lease_id: lease for lease in leases}
        paid = sum((cost(row, by_id[row.lease_id], prices) for row in rows), Decimal())
        assert abs(Decimal(ledger["dollars"]) - paid) < CENT / 1_000
        due = sum(sum(lease.pauses_due.values()) for lease in leases)
        found = sum((row.ends_at - row.starts_at).total_seconds() for row in rows if row.cause == "pause")
        # What is less than LEAST_S is not owed.
        assert found + due == pytest.approx(self.charged, abs=LEAST_S * max(1, self.charges)), (
            "a measured pause is charged in full"
        )
        self._check_work(rows, by_id)
        for since, until in (*spans, (None, None)):
            for job_id in (None, self.order.job_id):
                self._check_sums(rows, by_id, prices, job_id=job_id, since=since, until=until)

    def _check_sums(self, rows, leases, prices, *, job_id, since, until) -> None:
        """What the service answers from its sums is what all intervals together come to."""
        which = {"job_id": job_id, "since": since, "until": until}
        wanted = {name: value if name == "job_id" else value.isoformat() for name, value in which.items() if value}
        found = self.client.get("/api/v1/ledger", params=wanted).json()
        time, money = defaultdict(int), defaultdict(Decimal)
        for row in rows:
            part = SimpleNamespace(
                starts_at=max(row.starts_at, since or row.starts_at), ends_at=min(row.ends_at, until or row.ends_at)
            )
            if part.ends_at > part.starts_at and job_id in (None, row.job_id):
                time[row.cause] += (part.ends_at - part.starts_at) // MICRO
                money[row.cause] += cost(part, leases[row.lease_id], prices)
        answered = {item["cause"]: item for item in found["causes"]}
        assert {cause: round(Decimal(item["slot_seconds"]) * 10**6) for cause, item in answered.items()} == time, which
        for cause, item in answered.items():
            assert abs(Decimal(item["dollars"]) - money[cause]) < CENT / 1_000, (which, cause)

    def _check_work(self, rows: list[IntervalRow], leases: dict[int, LeaseRow]) -> None:
        """A step that was reported stands as work wherever its slot was leased, except for what pauses took of it."""
        for start, end in self.made:
            for row in rows:
                is_said = not any(step.finished_utc == end for step in self.said[leases[row.lease_id].node_id])
                if row.slot == 0 and is_said and row.starts_at < end and row.ends_at > start:
                    assert row.cause in ("productive", "pause"), (start, end, row.cause)


def cost(row: Any, lease: LeaseRow, prices: list[PoolPriceRow]) -> Decimal:
    """Second by second, so to speak: the price list of the pool is gone through in order."""
    listed = [price for price in prices if price.pool == lease.pool]
    total = Decimal()
    for place, price in enumerate(listed):
        start = row.starts_at if place == 0 else max(row.starts_at, price.effective_from)
        end = row.ends_at if place == len(listed) - 1 else min(row.ends_at, listed[place + 1].effective_from)
        if end > start:
            total += Decimal((end - start) // MICRO) * price.price_usd_per_hour
    return total / lease.slots / 3600 / 10**6


@pytest.fixture
def begin(client, context, clock, make_agent) -> Callable[[], History]:
    """A new fleet in the same database, whose job has been handed over once."""

    def fresh() -> History:
        with context.sessions.begin() as session:
            session.execute(text(f"TRUNCATE {TABLES} CASCADE"))
        job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
        agents = {name: make_agent(name) for name in NODES}
        for agent in agents.values():
            agent.sync()
        clock.advance(3)
        jobs.tick(context)
        for agent in agents.values():
            agent.sync()
        target = roster(job_id, 2, ParallelLayout(pp=2), *NODES)
        source, measures = agents["a"].roster(), HandoffMeasures(pause_s=0.0)
        world = mirror(source, target, clock(), mirror_seq=1, measures=measures)
        agents["a"].sync(handoffs=(world,))
        return History(client, context, clock, agents, make_agent, world, agents["a"].job_order(), clock())

    return fresh


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.timeout(240)
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(
    happened=st.lists(events, max_size=14), asked=st.tuples(*[st.integers(0, 20_000_000_000)] * 2), whole=st.booleans()
)
def test_any_history_tiles_to_the_microsecond_and_prices_to_the_cent(begin, happened, asked, whole):
    """Also as the service sums it up, for any time that is asked for, in whole hours or not."""
    history = begin()
    began_at = history.clock()
    for kind, *details in happened:
        getattr(history, kind)(*details)
    for name in NODES:
        history.report(name, 1.5, True)
    since, until = (began_at + micros * MICRO for micros in sorted(asked))
    if whole:
        since, until = hour_of(since), hour_of(until)
    history.check((since, until), (since, None), (None, until))
