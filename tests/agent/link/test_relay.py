"""While the service is away, whoever knows of a handoff, a checkpoint or a step may go: others must know it too."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent.driver.journal_records import keep_mirror
from agent.journal import Journal, Table
from agent.link.outbox import Outbox
from agent.link.relay import AGAIN_S, PATIENCE_S, PEERS, Relay
from agent.protocol.peer import ENVELOPE_BYTES_MAX, ROWS_PASSED_MAX, Envelope, FactsBody, in_time_of
from agent.protocol.sync import CheckpointFact, HandoffMirror, MetricsRow, StepRow
from agent.protocol.values import HandoffCause, HandoffState
from liver_core.layout.limits import METRIC_CHARS_MAX, METRICS_PER_STEP_MAX
from tests.agent.stub_service import JOB_ID, roster_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Network:
    """`away`: nodes that do not answer."""

    folder: Path
    away: set[str] = field(default_factory=set)
    service_is_there: bool = False
    now: float = 1_000.0
    sent: list[tuple[str, FactsBody]] = field(default_factory=list)
    nodes: dict[str, "Node"] = field(default_factory=dict)

    def node(self, name: str) -> "Node":
        if name not in self.nodes:
            self.nodes[name] = Node(self, name)
        return self.nodes[name]

    async def tick(self, name: str, *peers: str, is_going: bool = False) -> None:
        """One tick of this node, and what it sends has arrived."""
        relay = self.node(name).relay
        relay.tick(peers, is_going)
        if relay._task is not None:
            await relay._task


class Node:
    """One agent's outbox, journal and relay."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.outbox = network, Outbox()
        (network.folder / name).mkdir()
        self.journal = Journal(network.folder / name).open()
        self.relay = Relay(
            name, JOB_ID, self.outbox, self.journal, send=self._send, keep=keep_mirror,
            service_is_there=lambda: network.service_is_there, now=lambda: network.now,
        )  # fmt: skip

    async def _send(self, name: str, facts: FactsBody) -> bool:
        if name in self.network.away:
            return False
        self.network.sent.append((name, facts))
        await self.network.node(name).relay.work_of(facts)()
        return True

    def mirrors(self) -> dict[UUID, int]:
        """The handoffs that wait here, with their sequence numbers."""
        return {fact.handoff_id: fact.mirror_seq for _, fact in self.outbox.handoffs.waiting()}

    def checkpoints(self) -> list[int]:
        return [fact.step for _, fact in self.outbox.checkpoints.waiting()]

    def steps(self) -> list[int]:
        return [fact.step for _, fact in self.outbox.steps.waiting()]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path)
    yield network
    for node in network.nodes.values():
        node.journal.close()


def mirror(source: tuple[str, ...], target: tuple[str, ...], **more: Any) -> HandoffMirror:
    values: dict[str, Any] = {
        "handoff_id": uuid4(), "job_id": JOB_ID, "parent": 1, "generation": 2, "proposer": source[0],
        "cause": HandoffCause.NOTICE, "state": HandoffState.ACTIVE, "source": roster_of(1, source),
        "target": roster_of(2, target), "opened_utc": NOW, "changed_utc": NOW, "mirror_seq": 3,
    }  # fmt: skip
    return HandoffMirror(**values | more)


def checkpoint(step: int) -> CheckpointFact:
    return CheckpointFact(job_id=JOB_ID, generation=1, step=step, path=f"/c/{step}", finished_utc=NOW)


def step_row(step: int, job_id: str = JOB_ID) -> StepRow:
    return StepRow(job_id=job_id, generation=1, step=step, seconds=1.0, finished_utc=NOW)


def test_what_the_first_node_knows_reaches_the_last_although_no_two_worlds_in_a_row_but_one_node_are_the_same(
    network: Network,
) -> None:
    """Worlds {a, b}, {b, c}, {c, d}: a and b are gone before the service is back."""

    async def outage() -> None:
        first = mirror(("a", "b"), ("b", "c"))
        second = mirror(("b", "c"), ("c", "d"))
        network.node("a").outbox.put_checkpoint(checkpoint(20))
        network.node("a").outbox.put_step(step_row(19))
        await network.tick("a", "b", "c", is_going=True)
        network.away.add("a")
        network.node("b").outbox.put_handoff(first)
        await network.tick("b", "c", is_going=True)
        network.away.add("b")
        network.node("c").outbox.put_handoff(second)
        await network.tick("c", "d")
        assert network.node("c").mirrors().keys() == {first.handoff_id, second.handoff_id}
        # A node tells only of handoffs that it was in: of others the service would refuse to hear.
        assert network.node("d").mirrors().keys() == {second.handoff_id}
        assert network.node("c").checkpoints() == network.node("d").checkpoints() == [20]
        assert network.node("c").steps() == [19]
        assert network.node("d").steps() == [], "c stays, and reports them itself"

    asyncio.run(outage())


def test_a_service_that_is_there_takes_facts_itself_and_one_that_does_not_is_helped(network: Network) -> None:
    async def healthy() -> None:
        network.service_is_there = True
        node = network.node("a")
        node.outbox.put_checkpoint(checkpoint(20))
        await network.tick("a", "b")
        node.outbox.checkpoints.batch(1)
        node.outbox.acknowledge(1)
        network.now += 2 * PATIENCE_S
        await network.tick("a", "b")
        assert network.sent == []
        node.outbox.put_checkpoint(checkpoint(40))
        await network.tick("a", "b")
        network.now += PATIENCE_S
        await network.tick("a", "b")
        assert network.node("b").checkpoints() == [40]

    asyncio.run(healthy())


def test_each_fact_is_told_once_and_what_is_new_of_it_again_to_a_few_that_answer(network: Network) -> None:
    async def many() -> None:
        told = mirror(tuple("abcdef"), tuple("abcdef"))
        network.node("a").outbox.put_handoff(told)
        network.away.add("b")
        for _ in range(3):
            await network.tick("a", *"abcdef")
        assert [name for name, _ in network.sent] == ["c", "d"] and PEERS == 2
        newer = told.model_copy(update={"mirror_seq": 4})
        network.node("a").outbox.put_handoff(newer)
        await network.tick("a", *"abcdef")
        assert network.node("c").mirrors() == network.node("d").mirrors() == {told.handoff_id: 4}
        network.away.clear()
        network.now += AGAIN_S
        await network.tick("a", *"abcdef")
        assert network.node("b").mirrors() == {told.handoff_id: 4}

    asyncio.run(many())


def test_an_older_mirror_never_replaces_a_newer_one_nor_one_of_this_nodes_own(network: Network) -> None:
    async def late() -> None:
        node = network.node("a")
        mine, others = mirror(("a", "b"), ("a", "b")), mirror(("b", "a"), ("a", "b"))
        await node.relay.take(FactsBody(handoffs=(mine, others)))
        assert node.mirrors() == {others.handoff_id: 3}
        await node.relay.take(FactsBody(handoffs=(others.model_copy(update={"mirror_seq": 2}),)))
        assert node.mirrors() == {others.handoff_id: 3}
        kept = node.journal.get(Table.HANDOFF, str(others.handoff_id))
        assert kept is not None and kept["mirror_seq"] == 3, "it outlives this agent"
        again = others.model_copy(update={"generation": 3, "target": roster_of(3, ("a", "b")), "mirror_seq": 0})
        await node.relay.take(FactsBody(handoffs=(again,)))
        assert node.mirrors() == {others.handoff_id: 0}, "another agent has opened it since then, and counts anew"
        await node.relay.take(FactsBody(handoffs=(others.model_copy(update={"mirror_seq": 9}),)))
        assert node.mirrors() == {others.handoff_id: 0}

    asyncio.run(late())


def test_a_fact_of_another_job_is_refused_by_name_and_none_of_another_job_is_told(network: Network) -> None:
    async def foreign() -> None:
        node = network.node("a")
        with pytest.raises(ValueError, match=f"steps: must be about job {JOB_ID}, one is about other"):
            node.relay.work_of(FactsBody(steps=(step_row(1, "other"),)))
        node.outbox.put_step(step_row(1, "other"))
        await network.tick("a", "b", is_going=True)
        assert network.sent == []

    asyncio.run(foreign())


def test_many_rows_go_in_messages_that_a_peer_takes(network: Network) -> None:
    async def long() -> None:
        node = network.node("a")
        for number in range(ROWS_PASSED_MAX + 1):
            node.outbox.put_step(step_row(number))
        await network.tick("a", "b", is_going=True)
        assert [len(facts.steps) for _, facts in network.sent] == [ROWS_PASSED_MAX, 1]
        assert len(network.node("b").steps()) == ROWS_PASSED_MAX + 1

    asyncio.run(long())
    names = [f"{at:0{METRIC_CHARS_MAX - 1}}x".replace("0", "a", 1) for at in range(METRICS_PER_STEP_MAX)]
    row = MetricsRow(
        job_id=JOB_ID, generation=1, step=1, at_utc=NOW, values=dict.fromkeys(names, -1.2345678901234567e-100)
    )
    assert len(FactsBody(metrics=(row,) * ROWS_PASSED_MAX).model_dump_json()) < ENVELOPE_BYTES_MAX


def test_times_are_moved_to_the_clock_of_the_receiver() -> None:
    facts = FactsBody(handoffs=(mirror(("a", "b"), ("b",)),), checkpoints=(checkpoint(1),), steps=(step_row(1),))
    envelope = Envelope(
        sender="a", receiver="b", agent_incarnation=UUID(int=1), job_id=JOB_ID, issued_utc=NOW, body=facts
    )
    body = in_time_of(envelope, 60.0).body
    assert isinstance(body, FactsBody)
    later = NOW + timedelta(seconds=60)
    assert (body.handoffs[0].opened_utc, body.handoffs[0].changed_utc, body.handoffs[0].deadline_utc) == (
        later,
        later,
        None,
    )
    assert body.checkpoints[0].finished_utc == body.steps[0].finished_utc == later
