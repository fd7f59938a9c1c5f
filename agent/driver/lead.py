"""The leading side of one job on this node: it carries out what the leader decides, and mirrors it to the service.

Who leads, when again, and what another notice does is decided by the leader machine, the plan by `JobPlanner`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import assert_never
from uuid import UUID, uuid4

from agent.driver.job_planner import JobPlanner
from agent.driver.journal_records import keep_proposal
from agent.driver.mirrors import Mirrors
from agent.driver.node_context import Node
from agent.driver.planning import Pulse
from agent.driver.progress import LostTime, Progress, first_mirror, learned_from
from agent.journal import Table
from agent.peer.asking import PeersHeard
from agent.protocol.handoff_ends import state_of_end
from agent.protocol.peer import RankMeasures
from agent.protocol.sync import HandoffDeclined, HandoffMirror, JobOrder
from agent.supervisor.records import StoreKey
from agent.supervisor.stores import StoreError
from liver_core.handoff import Order, Proposer, ProposerRecord, Reason, Report, Stage
from liver_core.handoff.generations import next_number
from liver_core.handoff.leader import Leader
from liver_core.handoff.leader_events import (
    AskedToLead,
    AskPeers,
    Decline,
    Forwarded,
    HandoffAmended,
    HandoffEffect,
    HandoffOpened,
    HandoffSuperseded,
    HandoffWanted,
    LeaderEvent,
    LossesKnown,
    NoticeEffect,
    OwnNoticeWithdrawn,
    PeersAnswered,
    PeersUnreachable,
    Say,
    StartStore,
    StoreDied,
    StoreFailed,
    StoreReady,
    WorldStarted,
)
from liver_core.handoff.own_handoffs import Led
from liver_core.handoff.proposer_events import (
    Cancel,
    HandoffEnded,
    PersistProposal,
    Refused,
    ReportReceived,
    SendOrder,
    Tick,
)
from liver_core.layout import Member, Roster, from_json, to_json
from liver_core.layout.limits import fitting

_log = logging.getLogger(__name__)


class Lead:
    """`send_order` takes an order to a member; `post` runs something later in the job's own task; `ask` hears other
    nodes of the job; `uses_store` hears of the generation whose store a handoff needs; `seen`: the highest number that
    the ranks of this node have seen used, by whichever lead."""

    def __init__(
        self,
        node: Node,
        job_id: str,
        *,
        send_order: Callable[[Member, Order], Awaitable[None]],
        post: Callable[[Callable[[], Awaitable[None]]], None],
        pulse: Callable[[], Pulse],
        ask: Callable[[Collection[str]], Awaitable[PeersHeard]],
        uses_store: Callable[[int], None] = lambda generation: None,
        seen: Callable[[], int] = lambda: 0,
    ) -> None:
        self.mirrors = Mirrors(node)
        self.planner = JobPlanner(pulse=pulse, service_is_there=node.service_is_there, costs=lambda: self.mirrors.costs)
        self.status = self._said = ""
        self._unkept: HandoffMirror | None = None
        self._node = node
        self._job_id = job_id
        self._send_order = send_order
        self._post = post
        self._pulse = pulse
        self._ask = ask
        self._uses_store = uses_store
        self._seen = seen
        self._leader = self._new_leader()
        self._task: asyncio.Task[None] | None = None

    @property
    def progress(self) -> Progress | None:
        """How far the open handoff is."""
        return self.mirrors.progress

    def restore(self) -> None:
        """What the journal kept: the proposer's record, and the mirrors."""
        kept = self._node.journal.get(Table.PROPOSER, self._job_id)
        record = ProposerRecord() if kept is None else from_json(ProposerRecord, kept)
        open_id = record.proposal.handoff_id if record.proposal is not None else None
        self.mirrors.restore(self._job_id, open_id, record.ended)
        led = None
        if self.progress is not None:
            opened_at = self.progress.mirror.opened_utc.timestamp()
            led = Led(self.progress.leaving, opened_at, record.plan_revision, superseded=self.progress.superseded)
        self._leader = self._new_leader(record, led)

    @property
    def is_idle(self) -> bool:
        """Whether no handoff is open or being opened here."""
        return self._leader.own.is_idle

    def next_generation(self, order: JobOrder, active: Roster) -> int | None:
        """The number of the next handoff, if one can be opened."""
        number = next_number(max(self.used(), order.next_generation - 1), active.generation)
        return None if isinstance(number, str) else number

    def used(self) -> int:
        """The greatest number that is known here as used, or is about to be."""
        return max(self._leader.own.used, self._seen())

    @property
    def open_id(self) -> str:
        """The handoff that is open or being opened here, empty if none."""
        return self._leader.own.open_id

    async def hear(self, order: JobOrder, event: LossesKnown | HandoffWanted) -> tuple[NoticeEffect, ...]:
        """What is known of nodes that go, or what the service proposes. Returns what is to be done about notices."""
        self.planner.order = order
        return await self._feed(event)

    def note(self, event: AskedToLead | OwnNoticeWithdrawn | Forwarded) -> tuple[NoticeEffect, ...]:
        """The same of what has nothing to do with an open handoff."""
        effects = self._leader.handle(event, self._node.now())
        return tuple(effect for effect in effects if isinstance(effect, NoticeEffect))

    async def cancel(self, reason: Reason) -> None:
        """A person or the service wants no handoff any more."""
        await self._feed(Cancel(reason))

    async def give_way(self, started: int) -> None:
        """The service has started this world. Said again and again."""
        await self._feed(WorldStarted(started))

    async def take_store_death(self, generation: int) -> None:
        """The store of a world died."""
        await self._feed(StoreDied(generation))

    async def take_report(self, report: Report, measured: RankMeasures | None) -> None:
        """A participant reported, and its rank has `measured` so much; both may come after the handoff has ended."""
        progress = self.mirrors.find(report.handoff_id)
        if progress is not None:
            progress.take_report(report, measured, self._node.now())
        await self._feed(ReportReceived(report))
        # The report may have been the last one that the handoff waited for; then its end has been mirrored already.
        if progress is None or progress is not self.progress:
            return
        # A state that is new is told at once; all else soon, so that many reports make few mirrors.
        if progress.state_of(self._proposer.record) is not progress.mirror.state:
            await self.mirrors.say_open(self._proposer.record)

    async def tick(self, unreachable: dict[str, float]) -> None:
        """About twice a second. `unreachable`: since when each node's agent has not been reached."""
        await self.mirrors.say_stale(self._proposer.record)
        await self._feed(PeersUnreachable(unreachable))
        await self._feed(Tick())

    async def close(self) -> None:
        """Let go of what is being opened."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # The machine.

    @property
    def _proposer(self) -> Proposer:
        return self._leader.own.proposer

    def _new_leader(self, record: ProposerRecord | None = None, led: Led | None = None) -> Leader:
        return Leader(
            job_id=self._job_id,
            node_id=self._node.node_id,
            agent_incarnation=self._node.incarnation,
            planner=self.planner,
            new_id=lambda: str(uuid4()),
            record=record,
            led=led,
        )

    async def _feed(self, event: LeaderEvent) -> tuple[NoticeEffect, ...]:
        phase, is_told = self._proposer.record.phase, False
        others: list[NoticeEffect] = []
        for effect in self._leader.handle(event, self._node.now()):
            if isinstance(effect, NoticeEffect):
                others.append(effect)
            else:
                await self._carry_out(effect)
                is_told = is_told or isinstance(effect, HandoffOpened | HandoffAmended)
        record = self._proposer.record
        if is_told or (record.phase is not phase and record.proposal is not None):
            await self.mirrors.say_open(record)
        return tuple(others)

    async def _hear(self, event: PeersAnswered | StoreReady | StoreFailed) -> None:
        await self._feed(event)

    async def _carry_out(self, effect: HandoffEffect) -> None:
        match effect:
            case AskPeers(generation=generation, nodes=nodes):
                self._begin(self._ask_peers(generation, nodes))
            case StartStore(generation=generation):
                self._uses_store(generation)
                self._begin(self._start_store(generation))
            case HandoffOpened():
                self._take_opening(effect)
            case HandoffAmended(purpose=purpose):
                if self.progress is not None:
                    self.progress.amendment = purpose
            case HandoffSuperseded():
                if self.progress is not None:
                    self.progress.superseded = True
            case PersistProposal(record=record):
                mirror, self._unkept = self._unkept, None
                await asyncio.to_thread(keep_proposal, self._node.journal, self._job_id, to_json(record), mirror)
                if self.progress is not None:
                    self.progress.take_record(record, self._node.now())
            case SendOrder(member=member, order=order):
                await self._send_order(member, order)
            case HandoffEnded():
                await self._take_end(effect)
            case Refused(reason=reason):
                self._say(f"refused: {reason}")
            case Decline(handoff_id=handoff_id, reason=reason):
                fact = HandoffDeclined(handoff_id=UUID(handoff_id), job_id=self._job_id, reason=fitting(reason))
                self._node.outbox.put_declined(fact)
                self._node.sync_soon()
            case Say(text=text, about=about):
                self._say(text, about=about)
            case _:
                assert_never(effect)

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        """Of what is being opened. What was begun for one that is not opened any more is let go."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(work)

    async def _ask_peers(self, generation: int, nodes: tuple[str, ...]) -> None:
        heard = await self._ask(nodes)
        answered = PeersAnswered(generation, heard.too_few, heard.highest)
        self._post(lambda: self._hear(answered))

    async def _start_store(self, generation: int) -> None:
        try:
            store = await self._node.stores.host(StoreKey(self._job_id, generation), self._node.private_address)
        except StoreError as error:
            failed = StoreFailed(generation, str(error))
            return self._post(lambda: self._hear(failed))
        self._post(lambda: self._hear(StoreReady(generation, store)))

    def _take_opening(self, opened: HandoffOpened) -> None:
        proposal, purpose, now, pulse = opened.proposal, opened.purpose, self._node.now(), self._pulse()
        leavers = frozenset(proposal.source.members) - frozenset(proposal.members)
        # Counted from the end of the last whole step, so that the step under way is not taken for lost.
        lost_time = LostTime(now - pulse.step_age_s, pulse.step, pulse.median_step_s, known=pulse.step > 0)
        mirror = first_mirror(proposal, purpose, opened.generation, self._node.node_id, now)
        self.mirrors.progress = Progress(
            mirror, lost_time, purpose.notice_at, leavers, estimate_s=purpose.estimate_s, costs=purpose.costs
        )
        self._unkept = mirror

    async def _take_end(self, ended: HandoffEnded) -> None:
        progress, self.mirrors.progress = self.mirrors.progress, None
        _log.info("job %s: handoff %s ended %s: %s", self._job_id, ended.handoff_id, ended.stage, ended.reason)
        if progress is None:
            return
        progress.take_end(ended)
        if ended.stage is Stage.ACTIVE:
            progress.marks.setdefault("retired", self._node.now())
        self.planner.learned = learned_from(progress, self.planner.learned, ended)
        await self.mirrors.say_ended(ended.handoff_id, progress, state_of_end(ended), str(ended.stage))

    def _say(self, text: str, *, about: str = "") -> None:
        """Show it, and log it if it is news. `about`: what must differ then, where numbers in the text always do."""
        if (about or text) != self._said:
            _log.info("job %s: %s", self._job_id, text)
        self.status, self._said = text, about or text
