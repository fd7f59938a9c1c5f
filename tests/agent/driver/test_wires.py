"""When agents measure the wires between their nodes, and what becomes of what they find."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from agent.driver.node_context import Node
from agent.driver.wires import (
    ANSWER_S,
    BUSY_S,
    CALM_S,
    EVERY_S,
    FAILED_S,
    LIMITED_BYTES_MAX,
    OFFER_EVERY_S,
    SPREAD_S,
    JobWires,
)
from agent.link.outbox import Outbox
from agent.protocol.peer import WireAskedBody, WireOfferedBody
from agent.protocol.sync import JobOrder
from agent.protocol.wires import WireFact, WireKind, WireOffer, WireSpeed
from agent.supervisor.wire_checks import WireError
from liver_core.handoff import StoreAddress
from liver_core.layout import Roster
from tests.agent.stub_service import JOB_ID, roster_of
from tests.agent.virtual_time import run

NAMES = ("a", "b", "c")
WORLD = roster_of(1, NAMES)
BEGUN_S = CALM_S + SPREAD_S + 1.0
RELAY = WireSpeed(wire=WireKind.RELAY, bytes_per_s=110e6, latency_s=2e-4, refused=("b is on another machine",))


@dataclass
class Checks:
    """In the place of the two processes. `fails`: nodes that can offer nothing."""

    name: str
    network: "Network"
    read: list[tuple[str, str, int]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def offer(self, job_id: str, check_id: str, relay: str) -> AsyncIterator[tuple[WireOffer, Awaitable[None]]]:
        await asyncio.sleep(0.5)
        if self.name in self.network.fails:
            raise self.network.why
        offer = WireOffer(store=StoreAddress(f"10.0.0.{self.name}", 7), address=f"{self.name} {relay}")
        self.network.children.add(self.name)
        try:
            yield offer, asyncio.sleep(3.0)
        finally:
            self.network.children.discard(self.name)

    async def measure(self, job_id: str, check_id: str, relay: str, offer: WireOffer, bytes_max: int) -> WireSpeed:
        await asyncio.sleep(2.0)
        source, its_relay = offer.address.split()
        assert its_relay == f"relay-of-{source}-{check_id}" and relay == f"relay-of-{self.name}-{check_id}"
        self.read.append((source, check_id, bytes_max))
        return self.network.speed


class Network:
    """Agents of one job, whose messages arrive at once. `here`: nodes that share the address of the first."""

    def __init__(self, order: JobOrder, *, here: tuple[str, ...] = ()) -> None:
        hosts = {name: "10.0.0.0" if name in ("a", *here) else f"10.0.0.{NAMES.index(name)}" for name in NAMES}
        self.order = order.model_copy(update={"peers": {name: f"http://{host}:80" for name, host in hosts.items()}})
        self.fails: set[str] = set()
        self.why: Exception = WireError("no process could be forked")
        self.away: set[str] = set()
        self.relays: set[str] = set()
        self.children: set[str] = set()
        self.arriving: set[asyncio.Future[None]] = set()
        self.speed = RELAY
        self.outboxes = {name: Outbox() for name in NAMES}
        self.checks = {name: Checks(name, self) for name in NAMES}
        self.wires = {name: self._wires(name, hosts[name]) for name in NAMES}

    def _wires(self, name: str, host: str) -> JobWires:
        @contextlib.asynccontextmanager
        async def for_a_while(check_id: str, keys: tuple[str, ...]) -> AsyncIterator[str]:
            assert keys == ("key",)
            self.relays.add(name)
            try:
                yield f"relay-of-{name}-{check_id}"
            finally:
                self.relays.discard(name)

        relays = SimpleNamespace(for_a_while=for_a_while, name_for=lambda *_: pytest.fail("no handoff is open"))
        node = SimpleNamespace(
            node_id=name,
            private_address=host,
            outbox=self.outboxes[name],
            wires=self.checks[name],
            relays=relays,
            now=lambda: 1.8e9,
        )

        def send(to: str, body: Any, subject: str) -> None:
            if to not in self.away:
                arriving = asyncio.ensure_future(self.wires[to].take(name, body))
                self.arriving.add(arriving)
                arriving.add_done_callback(self.arriving.discard)

        return JobWires(cast(Node, node), JOB_ID, order=lambda: self.order, keys=lambda: ("key",), send=send)

    async def passes(self, seconds: float, world: Roster | None = WORLD, *, calm: bool = True) -> None:
        for _ in range(int(2 * seconds)):
            for wires in self.wires.values():
                wires.tick(world, is_calm=calm)
            await asyncio.sleep(0.5)

    def found(self, name: str) -> list[WireFact]:
        return [fact for _, fact in self.outboxes[name].wires.waiting()]


def test_each_node_measures_the_next_one_once_an_hour(order: JobOrder) -> None:
    async def scene() -> None:
        network = Network(order)
        await network.passes(CALM_S - 1)
        assert not any(network.found(name) for name in NAMES)
        await network.passes(SPREAD_S + 10)
        facts = [fact for name in NAMES for fact in network.found(name)]
        assert {(fact.source, fact.target) for fact in facts} == {("b", "a"), ("c", "b"), ("a", "c")}
        assert all(fact.speed == RELAY for fact in facts) and not network.relays
        assert network.wires["a"].bytes_per_s == RELAY.bytes_per_s
        await network.passes(EVERY_S - 60)
        assert [len(network.checks[name].read) for name in NAMES] == [1, 1, 1]
        await network.passes(120)
        assert [len(network.checks[name].read) for name in NAMES] == [2, 2, 2]

    run(scene())


def test_nothing_is_measured_beside_a_handoff_and_the_wait_begins_anew_after_it(order: JobOrder) -> None:
    async def scene() -> None:
        network = Network(order)
        await network.passes(60, calm=False)
        await network.passes(CALM_S - 1)
        await network.passes(60, None)
        await network.passes(CALM_S - 1, roster_of(2, NAMES))
        assert not any(network.checks[name].read for name in NAMES)

    run(scene())


def test_a_handoff_ends_what_is_being_measured_and_the_last_figure_stays(order: JobOrder) -> None:
    async def scene() -> None:
        network = Network(order)
        await network.passes(BEGUN_S + 10)
        for wires in network.wires.values():
            wires._next_at.clear()
        await network.passes(2.0)
        assert network.relays == set(NAMES) == network.children
        await network.passes(1.0, calm=False)
        assert not network.relays and not network.children
        assert len(network.found("a")) == 1 and network.wires["a"].bytes_per_s == RELAY.bytes_per_s
        await network.passes(BEGUN_S + 10)
        assert len(network.checks["a"].read) == 2

    run(scene())


def test_a_failure_leaves_the_last_figure_and_whatever_is_raised_is_a_failure(order: JobOrder) -> None:
    async def scene() -> None:
        network = Network(order)
        await network.passes(BEGUN_S + 10)
        network.fails = set(NAMES)
        network.why = RuntimeError("x" * 5_000)
        await network.passes(EVERY_S)
        assert len(network.found("a")[-1].failed) == 2_000
        assert network.wires["a"].bytes_per_s == RELAY.bytes_per_s

    run(scene())


def test_who_has_no_time_is_asked_again_soon_and_that_is_no_finding(order: JobOrder) -> None:
    async def scene() -> None:
        network = Network(order, here=("b",))  # Both read c.
        await network.passes(BEGUN_S + 1)
        await network.passes(2 * BUSY_S)
        assert [fact.speed for name in NAMES for fact in network.found(name)] == [RELAY] * 3
        for _ in range(3):
            await network.wires["a"].take("c", WireAskedBody(check_id=UUID(_some_id())))
        assert len(network.children) == 0
        await asyncio.sleep(1.0)
        assert network.children == {"a"}
        await asyncio.sleep(3.0)
        await network.wires["a"].take("c", WireAskedBody(check_id=UUID(_some_id())))
        await asyncio.sleep(1.0)
        assert not network.children, f"it waits {OFFER_EVERY_S} s before it is read again"

    run(scene())


@pytest.mark.parametrize(
    ("url", "is_elsewhere"),
    [
        ("http://10.0.0.1:80", True),
        ("http://10.0.0.0:80", False),
        ("http://[fd00::1:80", False),
        ("http://nodes.example:80", True),
        ("http://[FD00:0::1]:80", True),
    ],
)
def test_a_url_that_nobody_can_read_is_nowhere(order: JobOrder, url: str, is_elsewhere: bool) -> None:
    network = Network(order)
    network.order = order.model_copy(update={"peers": {"a": "http://10.0.0.0:80", "b": url}})
    assert network.wires["a"]._is_elsewhere("b") is is_elsewhere


def test_an_address_is_the_same_however_it_is_written(order: JobOrder) -> None:
    network = Network(order)
    network.order = order.model_copy(update={"peers": {"b": "http://[FD00:0::1]:80"}})
    network.wires["a"]._node = cast(Node, SimpleNamespace(private_address="fd00::1"))
    assert not network.wires["a"]._is_elsewhere("b")


def test_nodes_of_one_address_are_passed_over(order: JobOrder) -> None:
    async def scene() -> None:
        network = Network(order, here=("b",))
        await network.passes(BEGUN_S + BUSY_S + 10)  # One of the two that read c has to wait.
        pairs = {(fact.source, fact.target) for name in NAMES for fact in network.found(name)}
        assert pairs == {("c", "a"), ("c", "b"), ("a", "c")}
        alone = Network(order, here=NAMES)
        await alone.passes(BEGUN_S + 10)
        assert not any(alone.found(name) for name in NAMES) and not alone.wires["a"].relay_of("h1")

    run(scene())


def test_what_cannot_be_measured_is_told_with_its_reason_and_tried_again(
    order: JobOrder, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        network = Network(order)
        network.fails, network.away = {"b"}, {"c"}
        await network.passes(BEGUN_S + ANSWER_S + 10)
        assert [fact.failed for fact in network.found("a")] == ["b offers nothing: no process could be forked"]
        assert [fact.failed for fact in network.found("b")] == [f"c did not answer within {ANSWER_S:g} s"]
        assert network.wires["a"].bytes_per_s is None
        network.fails = set()
        await network.passes(FAILED_S)
        assert network.found("a")[-1].speed == RELAY

    run(scene())
    assert caplog.text.count("the wire from b could not be measured") == 1


def test_a_slow_wire_is_in_the_log_once_with_its_reason(order: JobOrder, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        network = Network(order)
        network.speed = WireSpeed(wire=WireKind.GLOO, bytes_per_s=1e8, latency_s=1e-3, refused=("no relay listens",))
        await network.passes(BEGUN_S + 10)
        await network.passes(EVERY_S + 60)
        assert [len(network.checks[name].read) for name in NAMES] == [2, 2, 2]

    run(scene())
    assert caplog.text.count("state of b is copied here in the pause, over gloo: no relay listens") == 1


def test_a_job_with_a_limit_reads_little(order: JobOrder) -> None:
    async def scene() -> None:
        spec = order.spec.model_copy(update={"stream_gbps_max": 1.0})
        network = Network(order.model_copy(update={"spec": spec}))
        await network.passes(BEGUN_S + 10)
        assert [size for _, _, size in network.checks["a"].read] == [LIMITED_BYTES_MAX]

    run(scene())


def test_a_node_in_a_handoff_offers_nothing_and_a_late_answer_is_nobodys(order: JobOrder) -> None:
    async def scene() -> None:
        network = Network(order)
        for _ in range(2 * int(BEGUN_S + 10)):
            network.wires["a"].tick(WORLD, is_calm=True)
            network.wires["b"].tick(WORLD, is_calm=False)
            await asyncio.sleep(0.5)
        assert not network.found("a"), "b has no time, which is no finding"
        offer = WireOffer(store=StoreAddress("10.0.0.1", 7), address="b relay")
        late = WireOfferedBody.model_validate({"check_id": _some_id(), "offer": offer}, strict=False)
        await network.wires["a"].take("b", late)
        assert not network.checks["a"].read

    run(scene())


def _some_id() -> str:
    return "00000000-0000-4000-8000-000000000000"
