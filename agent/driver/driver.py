"""All jobs of this node: routes orders, notices, peer messages and rank events to the job they are about."""

import logging
from collections import deque

from agent.driver.job_driver import JobDriver
from agent.driver.node_context import Node
from agent.journal import Table
from agent.link.kept_orders import peer_keys_of
from agent.link.log_shipper import LogFile
from agent.peer.peer_server import PeerRefused
from agent.protocol.notice_life import Notices, key_of
from agent.protocol.peer import Envelope
from agent.protocol.rank import MetricsReport, RankEvent
from agent.protocol.sync import (
    MetricsRow,
    NodeAnswers,
    NoticeFact,
    PeerKeyKept,
    RankStatus,
    Refusal,
    StoreHosted,
    SyncOrders,
)
from agent.protocol.values import utc
from agent.supervisor.records import RankState, SlotKey, StoreKey
from liver_core.handoff import Reason

ENDED_LOGS_MAX = 64
_log = logging.getLogger(__name__)


class Driver:
    """Made before its node's parts, since they call back into it; `bind` gives it the node."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobDriver] = {}
        self._node: Node | None = None
        self._ended_logs: deque[LogFile] = deque(maxlen=ENDED_LOGS_MAX)
        self._notices = Notices()
        self._refused: frozenset[Refusal] = frozenset()

    @property
    def node(self) -> Node:
        """The node, once bound."""
        assert self._node is not None, "the driver is bound before anything is routed to it"
        return self._node

    def bind(self, node: Node) -> None:
        """Take the node, and everything the journal knows."""
        self._node = node
        journal = node.journal
        for key, data in journal.items(Table.NOTICE):
            fact = NoticeFact.model_validate(data, strict=False)
            if key != _notice_record(fact):  # As earlier agents named it.
                journal.put(Table.NOTICE, _notice_record(fact), data)
                journal.delete(Table.NOTICE, key)
            self._notices.take(fact)
            node.outbox.put_notice(fact)
        known = [key for key, _ in journal.items(Table.ORDERS)]
        known += [SlotKey.parse(key).job_id for key, _ in journal.items(Table.PARTICIPANT)]
        for job_id in dict.fromkeys(known):
            self._job(job_id)

    async def close(self) -> None:
        """Stop driving; ranks and stores live on."""
        for job in self.jobs.values():
            await job.close()

    # Looking up.

    def keys_of(self, job_id: str) -> tuple[str, ...]:
        """The peer keys of a job of this node, the current one first; none for a job that it has no part in."""
        job = self.jobs.get(job_id)
        return () if job is None else job.peer_keys()

    def address_of(self, job_id: str, node_id: str) -> str | None:
        """URL of another agent of a job."""
        job = self.jobs.get(job_id)
        return None if job is None or job.order is None else job.order.peers.get(node_id)

    def peer_keys(self) -> tuple[PeerKeyKept, ...]:
        """What reports say of keys that change."""
        return peer_keys_of(job.order for job in self.jobs.values() if job.order is not None)

    def statuses(self) -> tuple[RankStatus, ...]:
        """Every rank of this node."""
        return tuple(status for job in self.jobs.values() for status in job.statuses())

    def stores(self) -> tuple[StoreHosted, ...]:
        """Every store of this node."""
        return tuple(store for job in self.jobs.values() for store in job.stores())

    def answering(self) -> tuple[NodeAnswers, ...]:
        """Machines that the service asked about and that this node reaches."""
        return tuple(
            NodeAnswers(job_id=job_id, node_id=name)
            for job_id, job in self.jobs.items()
            for name in job.probes.answering()
        )

    def logs(self) -> tuple[LogFile, ...]:
        """The log of every rank process, under the world and rank that it has or had last: last words matter most."""
        alive = [_log_file(key, state) for key, state in self.node.supervisor.states.items()]
        return (*alive, *self._ended_logs)

    # Routing.

    def take_orders(self, orders: SyncOrders) -> None:
        """The service's answer: jobs that it does not name any more are forgotten once nothing of them is left."""
        unknown = {refusal.key for refusal in orders.refusals if refusal.part == "jobs"}
        for refusal in orders.refusals:
            # What is no fact but how the node stands is sent, and refused, again: said once.
            if refusal not in self._refused:
                _log.warning("the service refuses %s %s: %s", refusal.part, refusal.key, refusal.reason)
        self._refused = frozenset(orders.refusals)
        for order in orders.jobs:
            self._job(order.job_id).take_orders(order, heard_at=self.node.service_heard_at())
        named = {order.job_id for order in orders.jobs}
        for job_id in tuple(self.jobs):
            if job_id in unknown:
                self.jobs[job_id].abandon("the service knows no such job")
            if job_id not in named:
                self.jobs[job_id].leave()
                if not self.jobs[job_id].is_needed:
                    self._forget(job_id)

    def take_notice(self, fact: NoticeFact) -> None:
        """A notice of this node is new, nearer or withdrawn; it is journalled and told to the service and every job."""
        self._notices.take(fact)
        self.node.journal.put(Table.NOTICE, _notice_record(fact), fact.model_dump(mode="json"))
        self.node.outbox.put_notice(fact)
        for job in self.jobs.values():
            job.take_notice(fact)
        self.node.sync_soon()

    def forget_notice(self, fact: NoticeFact) -> None:
        """A notice of this node is over. The service ends it at the same moment, by the same rule."""
        self._notices.drop(key_of(fact))
        self.node.journal.delete(Table.NOTICE, _notice_record(fact))

    def own_notices(self) -> tuple[NoticeFact, ...]:
        """What this node has told of itself, as the journal keeps it."""
        return self._notices.all()

    async def take_envelope(self, envelope: Envelope) -> None:
        """A message of a peer. Raises PeerRefused."""
        job = self.jobs.get(envelope.job_id)
        if job is None:
            raise PeerRefused(f"job_id: this node has no part in {envelope.job_id}")
        self.node.peers.mark_reachable(envelope.job_id, envelope.sender)
        job.take_envelope(envelope)

    def take_rank_event(self, key: SlotKey, event: RankEvent) -> None:
        """A rank said something. Without a node there is no driving, as when ranks are only being ended."""
        if self._node is None:
            return
        if isinstance(event, MetricsReport):
            self._node.outbox.put_metrics(
                MetricsRow(
                    job_id=key.job_id,
                    generation=event.generation,
                    step=event.step,
                    at_utc=utc(self._node.now()),
                    values=event.values,
                )
            )
        else:
            self._job(key.job_id).take_rank_event(key.slot, event)

    def take_rank_exit(self, key: SlotKey, reason: Reason, state: RankState) -> None:
        """A rank process ended."""
        if self._node is not None:
            self._ended_logs.append(_log_file(key, state))
            self._job(key.job_id).take_rank_exit(key.slot, reason, state)

    def take_hang(self, key: SlotKey, reason: str) -> None:
        """A rank hangs."""
        self._job(key.job_id).hang(key.slot, reason)

    def take_store_exit(self, key: StoreKey) -> None:
        """A store died. A handoff that was opened here over it is aborted at once; ranks in its pause find out by
        themselves."""
        _log.warning("the store of %s died", key)
        job = self.jobs.get(key.job_id)
        if job is not None:
            job.take_store_exit(key.generation)

    def _job(self, job_id: str) -> JobDriver:
        job = self.jobs.get(job_id)
        if job is None:
            job = self.jobs[job_id] = JobDriver(self.node, job_id)
            job.restore()
            job.start()
            for fact in self._notices.all():
                job.take_notice(fact)
        return job

    def _forget(self, job_id: str) -> None:
        job = self.jobs.pop(job_id)
        job.forget()
        journal = self.node.journal
        for table in (Table.ORDERS, Table.PROPOSER):
            journal.delete(table, job_id)
        for key, _ in journal.items(Table.PARTICIPANT):
            if SlotKey.parse(key).job_id == job_id:
                journal.delete(Table.PARTICIPANT, key)
        for key, data in journal.items(Table.HANDOFF):
            if data["job_id"] == job_id:
                journal.delete(Table.HANDOFF, key)


def _log_file(key: SlotKey, state: RankState) -> LogFile:
    return LogFile(state.record.log_path, key.job_id, state.generation, state.rank)


def _notice_record(fact: NoticeFact) -> str:
    return "/".join(name for name in (fact.node_id, fact.kind, fact.source, fact.event_id) if name)
