"""One job on this node: everything that happens to it goes through one queue, in order, and from there to its parts.

The parts: `JobSlots` (participants and ranks), `Lead` (the proposer), `Births` (worlds that the service starts),
`NoticeResponse` (notices and whose turn it is). Nothing here waits for the service.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from agent.driver.lead import Lead
from agent.driver.lifecycle import Births
from agent.driver.mirrors import relay_of
from agent.driver.node_context import Node
from agent.driver.notice_response import NoticeResponse
from agent.driver.pace import Pace
from agent.driver.participants import JobSlots
from agent.driver.planning import lead_candidates
from agent.driver.rank_facts import checkpoint_fact, step_row, with_news
from agent.driver.rank_host import STOP_GRACE_S, RankHost
from agent.driver.spare_store import KEPT_BY, SpareStore
from agent.driver.wires import JobWires
from agent.journal import JournalError, Table
from agent.link.step_leases import StepLeases
from agent.peer.asking import STEP_FIELD, ask_others, ask_step_s, status_of
from agent.peer.deaths import Deaths
from agent.peer.peer_server import PeerRefused
from agent.peer.probe import Probes, is_reached
from agent.protocol.peer import (
    DeathBody,
    Envelope,
    FactsBody,
    NoticeBody,
    OrderBody,
    PeerBody,
    RankMeasures,
    ReportBody,
    SuspensionBody,
    WireAskedBody,
    WireOfferedBody,
)
from agent.protocol.rank import (
    Checkpointed,
    CheckpointFailed,
    Finished,
    Hello,
    RankEvent,
    StageReport,
    StepLease,
    StepReport,
)
from agent.protocol.step_leases import HIGHEST_FIELD, answered_ago, lease_for
from agent.protocol.sync import (
    DesiredState,
    JobFinished,
    JobOrder,
    NoticeFact,
    RankStatus,
    StepRow,
    StoreHosted,
)
from agent.protocol.values import utc
from agent.supervisor.records import RankState
from liver_core.handoff import Order, RankStage, Reason, Report
from liver_core.handoff.participant import ParticipantState
from liver_core.layout import Member

TICK_S, INBOX_MAX = 0.5, 100_000
_OVER = (RankStage.LEFT, RankStage.FINISHED)
_log = logging.getLogger(__name__)
Work = Callable[[], Awaitable[None]]


class JobDriver:
    """Nothing here catches a JournalError: an agent that cannot persist must not speak, and ends."""

    def __init__(self, node: Node, job_id: str) -> None:
        self.job_id = job_id
        self.order: JobOrder | None = None
        self._node = node
        self._inbox: asyncio.Queue[Work] = asyncio.Queue(INBOX_MAX)
        self._task: asyncio.Task[None] | None = None
        self._host = RankHost(job_id, node.supervisor, self._launch_failed)
        self.slots = JobSlots(
            node,
            job_id,
            self._host,
            spec_of=lambda: self.order.spec if self.order else None,
            relay_of=lambda order: self.wires.relay_of(order.handoff_id),
            send_report=self._send_report,
        )
        self._deaths = Deaths(node.node_id, self.slots.participants, send=self._send, say=self._host.say_all)
        self.spare = SpareStore(node, job_id)
        self.pace = Pace(
            node.node_id,
            pulses=lambda: [state.pulse for state in self._host.states().values()],
            ask=partial(ask_step_s, node.peers, job_id),
            look_again=lambda: self.post(self._consider_notices),
        )
        ask = partial(ask_others, node.peers, job_id, node.node_id)
        hears = {"ask": ask, "uses_store": self.spare.use, "seen": self.slots.highest_generation}
        self.lead = Lead(node, job_id, send_order=self._send_order, post=self.post, pulse=self.pace.pulse, **hears)
        self.births = Births(node, job_id, self.slots, self._host, self.lead)
        self.notices = NoticeResponse(node, job_id, self.slots, self.lead, self.births.alone, self.pace)
        self.relay = relay_of(node, job_id)
        self.wires = JobWires(node, job_id, order=lambda: self.order, keys=self.peer_keys, send=self._send)
        self.lead.planner.wire_bytes_per_s = lambda: self.wires.bytes_per_s
        self.probes = Probes()
        self._leases = StepLeases(
            job_id,
            heard_ago=self._heard_ago,
            reaches_service=lambda: is_reached(node.service_url),
            look_again=node.look_for_service,
            give=self._give_leases,
        )
        self._is_named = True
        self._lost: dict[int, RankStatus] = {}
        self._finished: set[int] = set()
        self._last_row: StepRow | None = None
        self._measured: dict[int, tuple[str, RankMeasures]] = {}  # by slot, with the handoff that it is about

    def peer_keys(self) -> tuple[str, ...]:
        """The current one first; none before the first order of the service."""
        keys = () if self.order is None else (self.order.peer_key, self.order.peer_key_before)
        return tuple(key for key in keys if key is not None)

    def restore(self) -> None:
        """What the journal kept of this job."""
        if (order := self._node.journal.get(Table.ORDERS, self.job_id)) is not None:
            self.order = JobOrder.model_validate_json(json.dumps(order))
        self._host.restore()
        self.slots.restore()
        self.lead.restore()

    def start(self) -> None:
        """Begin to work; ranks are asked where they stand first."""
        self.post(self.slots.start)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop working; ranks and stores live on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        parts = (self.lead, self.spare, self.notices, self.pace, self.relay, self.wires, self.probes)
        for part in (*parts, self._leases, self._host):
            await part.close()

    def forget(self) -> None:
        """Nothing of the job is left on this node."""
        if self._task is not None:
            self._task.cancel()

    def leave(self) -> None:
        """The service names the job to this node no more: what its worlds needed here is ended once they are gone."""
        self._is_named = False

    def abandon(self, reason: str) -> None:
        """The service disowns the job: its ranks are ended."""
        for slot in self._host.busy():
            self._host.end(slot, reason, STOP_GRACE_S)

    def post(self, work: Work) -> None:
        """Have something done in this job's turn."""
        try:
            self._inbox.put_nowait(work)
        except asyncio.QueueFull:
            _log.error("job %s: more than %d things wait, one was dropped", self.job_id, INBOX_MAX)

    @property
    def is_needed(self) -> bool:
        """Whether this node still holds anything of the job."""
        hosted = self.spare.is_starting or any(key.job_id == self.job_id for key, _ in self._node.stores.hosted)
        return bool(self._host.states()) or hosted or self.slots.is_bound() or not self.lead.is_idle

    # What comes in.

    def take_orders(self, order: JobOrder, *, heard_at: float) -> None:
        """The service's wish, in answer to a report sent at `heard_at`."""
        self.post(lambda: self._take_orders(order, heard_at))

    def take_notice(self, fact: NoticeFact, *, asked_to_lead: bool = False) -> None:
        """A node will go; `asked_to_lead` when a peer says so because it is this node's turn."""
        self.post(lambda: self._take_notice(fact, asked_to_lead=asked_to_lead))

    def take_envelope(self, envelope: Envelope) -> None:
        """A message of another agent of the job. Raises PeerRefused naming field and rule."""
        try:
            self.post(self._work_of(envelope))
        except ValueError as error:
            raise PeerRefused(str(error)[:1_000]) from None

    def take_rank_event(self, slot: int, event: RankEvent) -> None:
        """A rank of this node said something."""
        state = self._host.state(slot)  # Its process may have ended when the event has its turn.
        self.post(lambda: self._take_rank_event(slot, event, state))

    def take_rank_exit(self, slot: int, reason: Reason, state: RankState) -> None:
        """A rank process of this node ended."""
        self.post(lambda: self._take_rank_exit(slot, reason, state))

    def take_store_exit(self, generation: int) -> None:
        """The store of a world, which this node hosted, ended by itself."""
        self.spare.use(generation)  # It is nobody's spare any more.
        self.post(lambda: self.births.take_store_death(generation, self._lost))

    def hang(self, slot: int, reason: str) -> None:
        """A rank of this node hangs; it is named, and shown with its state."""
        _log.warning("job %s: the rank in slot %d hangs: %s", self.job_id, slot, reason)
        self._node.sync_soon()

    # What goes out.

    def statuses(self) -> tuple[RankStatus, ...]:
        """Every rank of this node, those that were lost included."""
        alive = {slot: self._status(slot, state) for slot, state in sorted(self._host.states().items())}
        return (*alive.values(), *(status for slot, status in self._lost.items() if slot not in alive))

    def stores(self) -> tuple[StoreHosted, ...]:
        """The stores of this node that the service should know of."""
        elsewhere = self.order is not None and self.order.store_node not in (None, self._node.node_id)
        generation = self.order.generation if self.order is not None and elsewhere else None
        return tuple(
            StoreHosted(job_id=self.job_id, generation=key.generation, host=address.host, port=address.port)
            for key, address in self._node.stores.hosted
            if key.job_id == self.job_id and key.generation != generation and key != self.spare.key
        )

    def summary(self) -> dict[str, Any]:
        """For peers and for people."""
        active, heard_at = self.slots.active(), self._node.service_heard_at()
        by_service = 0 if self.order is None else self.order.next_generation - 1
        return {
            "node_id": self._node.node_id,
            "active_generation": active.generation if active is not None else None,
            HIGHEST_FIELD: max(self.lead.used(), self.slots.highest_generation(), by_service),
            STEP_FIELD: self.pace.pulse().median_step_s,
            "layout": str(active.layout) if active is not None else None,
            "leading": self.lead.open_id or None,
            "service_heard_s": None if math.isinf(heard_at) else time.monotonic() - heard_at,
            "status": self.lead.status,
            "ranks": [status.model_dump(mode="json") for status in self.statuses()],
        }

    # The queue.

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_tick = loop.time() + TICK_S
        while True:
            work: Work = self._tick
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_tick - loop.time())):
                    work = await self._inbox.get()
            if loop.time() >= next_tick and work != self._tick:
                await self._guarded(self._tick)
                next_tick = loop.time() + TICK_S
            elif work == self._tick:
                next_tick = loop.time() + TICK_S
            await self._guarded(work)

    async def _guarded(self, work: Work) -> None:
        try:
            await work()
        except JournalError:
            raise
        except Exception:
            # One message that could not be handled must not take the job's driver with it; the next ones say it again.
            _log.exception("job %s: something could not be handled", self.job_id)

    async def _tick(self) -> None:
        await self.slots.tick()
        await self.lead.tick(self._node.peers.unreachable_since(self.job_id))
        if self.order is not None:
            await self.births.consider(self.order, self._lost)
            await self._consider_notices()
            stays, goes = self.notices.who_stays(self.order)
            self.relay.tick(stays, goes)
            self.wires.tick(self.slots.active(), is_calm=not goes and self._is_calm(self.order))
            if goes:
                self._host.kill_stopped()
        await self._keep_spare_store()
        await self._tidy_stores()
        if self.order is not None and self._is_named:
            self.probes.tick(self.order.probe, self.order.peers)
            others = [name for name in self.order.peers if name != self._node.node_id]
            self._leases.tick(others, self.order.lost_after_s)

    def _is_calm(self, order: JobOrder) -> bool:
        """Whether the job trains, and no handoff is open or expected."""
        is_idle = self._is_named and self.lead.is_idle and not self.slots.is_bound() and order.handoff is None
        return is_idle and self.births.wanted(order) is DesiredState.RUN and self.pace.pulse().median_step_s > 0

    async def _take_orders(self, order: JobOrder, heard_at: float) -> None:
        self._is_named = True
        self._leases.take_answer(heard_at)
        if order != self.order:
            data = order.model_dump(mode="json", by_alias=True)
            await asyncio.to_thread(self._node.journal.put, Table.ORDERS, self.job_id, data)
            self.order = order  # Only now: reports say that its peer key outlives this process.
        for fact in order.notices:
            self.notices.take(fact, asked_to_lead=False)
        if order.generation is not None:
            self._lost = {slot: lost for slot, lost in self._lost.items() if lost.generation >= order.generation}
        await self.births.consider(order, self._lost)
        await self._consider_notices()
        if self.births.wanted(order) is not DesiredState.RUN:
            self._lost.clear()

    async def _take_notice(self, fact: NoticeFact, *, asked_to_lead: bool) -> None:
        """Answered as soon as it is heard: of a short notice every tenth of a second counts."""
        self.notices.take(fact, asked_to_lead=asked_to_lead)
        await self._consider_notices()

    async def _take_peers_notice(self, fact: NoticeFact, step_s: float) -> None:
        self.pace.take(step_s, 0 if self.order is None else self.order.generation or 0)
        await self._take_notice(fact, asked_to_lead=True)

    async def _consider_notices(self) -> None:
        if self.order is not None and self.births.wanted(self.order) is DesiredState.RUN:
            await self.notices.consider(self.order)

    def _work_of(self, envelope: Envelope) -> Work:
        match envelope.body:
            case OrderBody(slot=slot, order=order):
                if slot >= self._node.slots:
                    raise ValueError(f"slot: this node has {self._node.slots} slots, the order is for {slot}")
                if order.source is None:
                    raise ValueError("source: must not be null between agents; starts come from the service")
                return lambda: self.slots.take_order(slot, order)
            case ReportBody(report=report, measured=measured):
                return lambda: self.lead.take_report(report, measured)
            case NoticeBody(notice=fact, step_s=step_s):
                return lambda: self._take_peers_notice(fact, step_s)
            case DeathBody(death=death):
                return self._deaths.work_of(envelope.sender, death)
            case FactsBody() as facts:
                return self.relay.work_of(facts)
            case SuspensionBody() as body:
                return lambda: self.births.alone.take(body)
            case (WireAskedBody() | WireOfferedBody()) as body:
                return lambda: self.wires.take(envelope.sender, body)

    async def _take_rank_event(self, slot: int, event: RankEvent, state: RankState | None) -> None:
        match event:
            case Hello():
                self._leases.renew_now()
                await self.slots.take_hello(slot, event)
            case StageReport():
                if event.measures or event.certificate:
                    measured = RankMeasures(measures=event.measures, certificate=event.certificate)
                    self._measured[slot] = (str(event.handoff_id), measured)
                    self.pace.take_measures(event.measures)
                if self._concerns_others(slot) and self.slots.ends_with(slot, event):
                    await self._deaths.tell_broken(slot, event)  # Taking the stage forgets which worlds it is of.
                await self.slots.take_stage(slot, event)
                self._node.sync_with_progress()
            case StepReport():
                self._take_step(event)
                self.lead.mirrors.take_step(event.generation, event.step)
            case Checkpointed() | CheckpointFailed():
                self._take_checkpoint(slot, event, state)
            case Finished():
                self._take_finished(slot, event, state)
            case _:
                self._node.sync_soon()

    async def _take_rank_exit(self, slot: int, reason: Reason, state: RankState) -> None:
        participant = self.slots.participants.get(slot)
        # A newcomer that is past the boundary has its part in a world that others may already step in.
        cuts_over = participant is not None and participant.state is ParticipantState.CUTTING_OVER
        had_world = cuts_over or (participant is not None and participant.record.active is not None)
        is_over, is_condemned = slot in self._finished or state.stage in _OVER, self._host.is_condemned(slot)
        self._finished.discard(slot)  # The slot may get another process of this job.
        if had_world and not is_over and not is_condemned:
            _log.warning("job %s: %s", self.job_id, reason.text)
            lost = {"stage": RankStage.FAILED, "reason": reason, **self.slots.seat_of(slot, state)}
            self._lost[slot] = self._status(slot, state).model_copy(update=lost)
        if not is_over and self._concerns_others(slot):
            await self._deaths.tell(slot, reason)
        if self._host.ended(slot):
            await self.slots.take_death(slot, reason)
        self._node.sync_soon()

    def _concerns_others(self, slot: int) -> bool:
        """Whether other nodes are told that the rank of this slot ends: not where it was told to, as theirs are, except
        that others may wait for it at a boundary."""
        return not self._host.is_condemned(slot) or self.slots.is_awaited(slot)

    async def _launch_failed(self, slot: int, reason: Reason) -> None:
        self.post(lambda: self._take_failed_launch(slot, reason))

    async def _take_failed_launch(self, slot: int, reason: Reason) -> None:
        participant = self.slots.participants.get(slot)
        active = participant.record.active if participant is not None else None
        expected = self._host.is_condemned(slot)
        if not self._host.ended(slot):
            return  # It was to end, and another one is started in its place.
        if active is not None and not expected:
            rank = active.rank_of(Member(self._node.node_id, slot)) or 0
            self._lost[slot] = self.births.lost_rank(slot, rank, active.generation, reason)
        await self.slots.take_death(slot, reason)
        self._node.sync_soon()

    # Facts.

    def _take_step(self, event: StepReport) -> None:
        row = step_row(self.job_id, event, at=utc(self._node.now()))
        if (row := with_news(self._last_row, row)) is not None:
            self._last_row = row
            self._node.outbox.put_step(row)

    def _take_checkpoint(self, slot: int, event: Checkpointed | CheckpointFailed, state: RankState | None) -> None:
        if isinstance(event, Checkpointed):
            self.pace.take_checkpoint(event.step, event.seconds)
        world = event.generation or self.slots.world_of(slot, state)
        fact = checkpoint_fact(self.job_id, event, generation=world, now=self._node.now())
        self._node.outbox.put_checkpoint(fact)
        self._node.sync_soon()

    def _take_finished(self, slot: int, event: Finished, state: RankState | None) -> None:
        self._finished.add(slot)
        running = {number for number, each in self._host.states().items() if each.stage is not RankStage.FINISHED}
        if state is not None and (event.failed is not None or not running - self._finished):
            world = self.slots.world_of(slot, state)
            done = JobFinished(job_id=self.job_id, generation=world, step=event.step, failed=event.failed)
            self._node.outbox.put_finished(done)
        self._node.sync_soon()

    def _status(self, slot: int, state: RankState) -> RankStatus:
        participant = self.slots.participants.get(slot)
        world = None if participant is None else participant.record.active
        return state.status(self.job_id, slot, world=world, now=time.monotonic())

    # Step leases.

    async def _give_leases(self, until: float) -> None:
        order, how = self.order, {"until": until, "at": time.monotonic(), "now": self._node.now()}
        wanted = (order.generation if order is not None else None) or 0
        steps_from = order.steps_from_utc.timestamp() if order is not None and order.steps_from_utc else None
        for slot, state in self._host.states().items():
            if (lease := lease_for(state.generation, wanted=wanted, steps_from=steps_from, **how)) is not None:
                await self._host.give(slot, StepLease(until_s=lease))

    async def _heard_ago(self, node_id: str) -> float | None:
        answer = await status_of(self._node.peers, self.job_id, node_id)
        wanted = 0 if self.order is None else self.order.generation or 0
        return None if answer is None else answered_ago(answer, wanted=wanted)

    # Messages.

    async def _send_order(self, member: Member, order: Order) -> None:
        if member.node_id == self._node.node_id:
            self.post(lambda: self.slots.take_order(member.slot, order))
            return
        self._send(member.node_id, OrderBody(slot=member.slot, order=order), f"order/{member.slot}", attempts=1)

    async def _send_report(self, to: str, report: Report) -> None:
        handoff_id, measures = self._measured.get(report.member.slot, ("", None))
        measured = measures if handoff_id == report.handoff_id else None
        if to == self._node.node_id:
            self.post(lambda: self.lead.take_report(report, measured))
            return
        self._send(to, ReportBody(report=report, measured=measured), f"report/{report.member.slot}", attempts=1)

    def _send(self, to: str, body: PeerBody, subject: str, attempts: int = 3) -> None:
        self._node.peers.send_newest(self._node.envelope(self.job_id, to, body), subject, attempts=attempts)

    async def _tidy_stores(self) -> None:
        """End the stores of worlds that are over; one that a world or a handoff may still need stays."""
        if self.order is None or not self.lead.is_idle or self.slots.is_bound():
            return
        living = [memory for memory in self.slots.memories() if memory.record.active is not None]
        kept = {(memory.store.host, memory.store.port) for memory in living if memory.store is not None}
        wanted = None
        if self._is_named and self.births.wanted(self.order) is DesiredState.RUN:
            wanted = self.order.generation
            newest = self.lead.mirrors.newest_store(since=wanted or 0)
            kept |= set() if newest is None else {newest}
        for key, address in self._node.stores.hosted:
            is_over = key.generation != wanted and key != self.spare.key and (address.host, address.port) not in kept
            if key.job_id == self.job_id and is_over:
                await self._node.stores.retire(key)

    async def _keep_spare_store(self) -> None:
        """While no handoff is open: have the store of the next one ready where this node may have to lead it."""
        order, active = self.order, self.slots.active()
        if not self.lead.is_idle or self.slots.is_bound():
            return
        if order is None or not self._is_named or self.births.wanted(order) is not DesiredState.RUN or active is None:
            return await self.spare.keep(None)
        leads = self._node.node_id in lead_candidates(order, active, ())[:KEPT_BY]
        await self.spare.keep(self.lead.next_generation(order, active) if leads else None)
