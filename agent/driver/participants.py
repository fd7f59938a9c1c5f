"""The participant machines of one job on this node, one per slot, and the carrying out of what they want.

Persist first, then speak: effects are carried out in order, and a journal that cannot be written ends the agent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import assert_never
from uuid import UUID

from agent.driver.journal_records import SlotMemory
from agent.driver.node_context import Node
from agent.driver.rank_host import Launch, RankHost
from agent.journal import Table
from agent.protocol.jobfile import JobFile
from agent.protocol.rank import Abort, Hello, Permit, Prepare, Retire, StageReport, Withdraw
from agent.supervisor.records import RankState, SlotKey
from liver_core.handoff import (
    Decision,
    HandoffId,
    Order,
    Participant,
    ParticipantRecord,
    RankStage,
    Reason,
    Report,
    Stage,
)
from liver_core.handoff.participant import ParticipantState
from liver_core.handoff.participant_events import (
    ENDED_UNSEEN,
    AbortRank,
    ClearReadyTag,
    OrderReceived,
    ParticipantEffect,
    ParticipantEvent,
    Persist,
    PrepareRank,
    QueryRank,
    RankDied,
    RankReported,
    RetireRank,
    SendReport,
    SetReadyTag,
    StartRank,
    StartReceived,
    StopRank,
    Tick,
    WorldReplaced,
)
from liver_core.handoff.refusals import is_replaced
from liver_core.layout import Member, Roster, from_json, to_json

LEAVE_GRACE_S, ABORT_GRACE_S = 10.0, 10.0
NO_PROCESS = "no process of this rank runs on its node"
SETTLED_STAGES = (
    RankStage.CUTTING_OVER,
    RankStage.ACTIVE,
    RankStage.LEFT,
    RankStage.ABORTED,
    RankStage.BROKEN,
)
BEFORE_THE_FIRST_STEP = (
    RankStage.PREPARING,
    RankStage.STREAMING,
    RankStage.PREPARED,
    RankStage.READY,
    RankStage.CUTTING_OVER,
)
HELLO_ALONE_S = 0.4
"""Stage reports follow a hello at once; a rank that sends none for so long holds nothing of any handoff."""

_log = logging.getLogger(__name__)


class JobSlots:
    """`spec_of` gives the job file, `relay_of` the local name of this node's relay for a handoff, and `send_report`
    takes a report to whoever proposed."""

    def __init__(
        self,
        node: Node,
        job_id: str,
        host: RankHost,
        *,
        spec_of: Callable[[], JobFile | None],
        relay_of: Callable[[Order], str],
        send_report: Callable[[str, Report], Awaitable[None]],
    ) -> None:
        self.participants: dict[int, Participant] = {}
        self._memories: dict[int, SlotMemory] = {}
        self._node = node
        self._job_id = job_id
        self._host = host
        self._spec_of = spec_of
        self._relay_of = relay_of
        self._send_report = send_report
        self._hellos: dict[int, tuple[float, Hello]] = {}
        self._aborting_since: dict[int, float] = {}
        self._started = 0

    def restore(self) -> None:
        """What the journal kept."""
        for text, data in self._node.journal.items(Table.PARTICIPANT):
            key = SlotKey.parse(text)
            if key.job_id == self._job_id:
                self._memories[key.slot] = from_json(SlotMemory, data)
                self._add(key.slot, self._memories[key.slot].record)

    async def start(self) -> None:
        """Ask every rank where it stands."""
        for slot, participant in tuple(self.participants.items()):
            await self._carry_out(slot, participant.start(self._node.now()))

    def active(self) -> Roster | None:
        """The newest world that a rank of this node steps in."""
        worlds = [item.record.active for item in self.participants.values() if item.record.active is not None]
        return max(worlds, key=lambda world: world.generation, default=None)

    def newest_world(self) -> int:
        """The highest generation that a rank of this node has stepped in, 0 if none has."""
        records = [memory.record for memory in self.memories()]
        ended = (each.generation for record in records for each in record.ended if each.stage is Stage.ACTIVE)
        return max((*ended, *(record.active.generation for record in records if record.active)), default=0)

    def memory(self, slot: int) -> SlotMemory:
        """Record, origin and store of a slot."""
        return self._memories.get(slot, SlotMemory())

    def world_of(self, slot: int, state: RankState | None) -> int:
        """The generation that a rank of this slot is in, or was in when its process ended while no agent was there."""
        active = self.memory(slot).record.active
        if state is not None and (state.hello_received or active is None):
            return state.generation
        return 1 if active is None else max(active.generation, 1 if state is None else state.generation)

    def seat_of(self, slot: int, state: RankState) -> dict[str, int]:
        """`generation` as `world_of` tells it, and the number of the slot's `rank` in it."""
        generation, active = self.world_of(slot, state), self.memory(slot).record.active
        known = None
        if active is not None and active.generation == generation:
            known = active.rank_of(Member(self._node.node_id, slot))
        return {"generation": generation, "rank": state.rank if known is None else known}

    def memories(self) -> Iterator[SlotMemory]:
        """Of all slots."""
        return iter(self._memories.values())

    def highest_generation(self) -> int:
        """The highest number that a slot of this node has seen used."""
        return max((item.record.highest_generation for item in self.participants.values()), default=0)

    def has_ended(self, handoff_id: str) -> bool:
        """Whether a rank of this node took part in this handoff, whoever led it, and it is over."""
        return any(each.handoff_id == handoff_id for item in self.participants.values() for each in item.record.ended)

    def ends_with(self, slot: int, said: StageReport) -> bool:
        """Whether a rank that says so makes no step any more, though others may wait for it: it is broken; or it is a
        newcomer that drops what others may be past the boundary of."""
        participant = self.participants.get(slot)
        promise = None if participant is None else participant.record.promise
        if said.stage is not RankStage.ABORTED or participant is None or promise is None:
            return said.stage is RankStage.BROKEN
        return promise.handoff_id == str(said.handoff_id) and participant.is_awaited(said.reason)

    def is_awaited(self, slot: int) -> bool:
        """Whether the rank of this slot is a newcomer that others may wait for past the boundary."""
        participant = self.participants.get(slot)
        return participant is not None and participant.is_awaited()

    def is_bound(self) -> bool:
        """Whether any rank of this node is promised to a handoff."""
        return any(item.record.promise is not None for item in self.participants.values())

    def is_starting(self) -> bool:
        """Whether a rank of this node has yet to make the first step of the world that it was started for. It takes no
        part in a handoff before."""
        return any(self._is_starting(slot, memory) for slot, memory in self._memories.items())

    def starting_in(self, generation: int) -> dict[int, int]:
        """The same of the world with this number: the slots of such ranks, and their ranks in it."""
        found: dict[int, int] = {}
        for slot, memory in self._memories.items():
            world = memory.record.active
            rank = world.rank_of(Member(self._node.node_id, slot)) if world is not None else None
            if world is None or world.generation != generation or rank is None:
                continue
            is_launched = self._host.is_busy(slot) and self._host.state(slot) is None
            if is_launched or self._is_starting(slot, memory):
                found[slot] = rank
        return found

    def _is_starting(self, slot: int, memory: SlotMemory) -> bool:
        if memory.record.replaced is not None:
            return True
        active, state = memory.record.active, self._host.state(slot)
        if active is None or self._host.awaits(slot, active.generation):
            return active is not None
        if state is None or state.stage is RankStage.STARTING:
            return state is not None
        return state.handoff_id == memory.origin and state.stage in BEFORE_THE_FIRST_STEP

    def promised_order(self) -> Order | None:
        """The order of the handoff that ranks of this node are promised to."""
        return next((item.record.order for item in self.participants.values() if item.record.order is not None), None)

    def binding_order(self) -> Order | None:
        """The same of one that has not made its first step in the next world: after that it takes part in another, also
        where the agent that led this one is gone."""
        bound = (item for item in self.participants.values() if item.state is not ParticipantState.ACTIVE)
        return next((item.record.order for item in bound if item.record.order is not None), None)

    async def give_up(self, generation: int) -> bool:
        """The service has started `generation`: what any slot holds of an older world or handoff is over. Whether that
        is news to one of them."""
        self._started = max(self._started, generation)
        news = [slot for slot, item in self.participants.items() if is_replaced(item.record, generation)]
        for slot in news:
            await self.feed(slot, WorldReplaced(generation))
        return bool(news)

    async def take_start(self, slot: int, order: Order) -> None:
        """The service has this slot start a rank."""
        self._know(slot)
        await self.feed(slot, StartReceived(order))

    async def take_order(self, slot: int, order: Order) -> None:
        """An order of a proposer, from here or from a peer."""
        self._know(slot)
        await self.feed(slot, OrderReceived(order))

    def _know(self, slot: int) -> None:
        """A slot that had no part in the job may get one. Numbers before the newest start are used up for it too."""
        if slot not in self.participants:
            record = self.memory(slot).record
            highest = max(record.highest_generation, self._started - 1)
            self._add(slot, replace(record, highest_generation=highest))

    async def take_hello(self, slot: int, hello: Hello) -> None:
        """A rank connected, or answered a query; what it holds of a handoff follows in stage reports."""
        participant = self.participants.get(slot)
        if participant is None:
            return
        await self._host.deliver(slot, again=True)
        self._hellos[slot] = (self._node.now(), hello)
        if participant.record.promise is None:
            await self.feed(slot, _in_world(hello))

    async def take_stage(self, slot: int, report: StageReport) -> None:
        """A rank said where it stands in a handoff."""
        participant, stage = self.participants.get(slot), report.stage
        if participant is None or not stage.is_of_handoff:
            return
        promise = participant.record.promise
        if promise is not None and promise.handoff_id != str(report.handoff_id):
            return
        self._hellos.pop(slot, None)
        older = promise is not None and report.plan_revision not in (None, promise.plan_revision)
        if stage in SETTLED_STAGES and not older:
            self._host.settle(slot)
        decision = report.decision
        if decision is Decision.UNDECIDED and stage in (RankStage.ACTIVE, RankStage.LEFT):
            decision = Decision.GO
        handoff_id = HandoffId(str(report.handoff_id))
        await self.feed(
            slot, RankReported(handoff_id, report.generation, stage, decision, report.reason, report.plan_revision)
        )

    async def take_death(self, slot: int, reason: Reason) -> None:
        """The slot's process has ended, or could not be started."""
        if slot in self.participants:
            await self.feed(slot, RankDied(reason))

    async def tick(self) -> None:
        """About twice a second."""
        now = self._node.now()
        for slot, participant in tuple(self.participants.items()):
            await self._host.deliver(slot)
            said_at, hello = self._hellos.get(slot, (now, None))
            if participant.state is ParticipantState.RESTORING and hello and now - said_at > HELLO_ALONE_S:
                del self._hellos[slot]
                await self.feed(slot, _in_world(hello))
            if participant.wants_ticks:
                await self.feed(slot, Tick())
            await self._end_stuck_abort(slot, participant, now)

    async def feed(self, slot: int, event: ParticipantEvent) -> None:
        """One event into one machine."""
        await self._carry_out(slot, self.participants[slot].handle(event, self._node.now()))

    def _add(self, slot: int, record: ParticipantRecord) -> None:
        self.participants[slot] = Participant(
            job_id=self._job_id,
            member=Member(self._node.node_id, slot),
            agent_incarnation=self._node.incarnation,
            record=record,
        )

    async def _carry_out(self, slot: int, effects: tuple[ParticipantEffect, ...]) -> None:
        for effect in effects:
            await self._carry_out_one(slot, effect)

    async def _carry_out_one(self, slot: int, effect: ParticipantEffect) -> None:
        match effect:
            case Persist(record=record, born=born):
                self._memories[slot] = self._remember(slot, record, born)
                await self._persist(slot)
            case PrepareRank(order=order):
                await self._prepare(slot, order)
            case StartRank(order=order):
                await self._start(slot, order)
            case SetReadyTag(handoff_id=handoff_id, plan_revision=revision):
                await self._host.tell(slot, Permit(handoff_id=UUID(handoff_id), plan_revision=revision))
            case ClearReadyTag(handoff_id=handoff_id):
                await self._host.tell(slot, Withdraw(handoff_id=UUID(handoff_id)))
            case AbortRank(handoff_id=handoff_id, reason=reason):
                await self._abort(slot, handoff_id, reason)
            case RetireRank(handoff_id=handoff_id):
                await self._host.tell(slot, Retire(handoff_id=UUID(handoff_id)))
            case StopRank(reason=reason, at_once=at_once):
                self._host.end(slot, str(reason), 0.0 if at_once else LEAVE_GRACE_S)
                if at_once and not self._host.is_busy(slot):
                    await self.feed(slot, RankDied(Reason(NO_PROCESS, "start", cause=ENDED_UNSEEN)))
            case QueryRank():
                if not await self._host.query(slot) and not self._host.is_busy(slot):
                    await self.feed(slot, RankDied(Reason(NO_PROCESS, "adopt", cause=ENDED_UNSEEN)))
            case SendReport(to=to, report=report):
                await self._send_report(to, report)
            case _:
                assert_never(effect)

    def _remember(self, slot: int, record: ParticipantRecord, born: Order | None) -> SlotMemory:
        """The world's birth is not in the record: a world made by a handoff is born of that, any other of a start."""
        memory = self.memory(slot)
        order = born or record.order
        if record.active is not None and order is not None and record.active.generation == order.generation:
            return SlotMemory(record=record, origin=str(order.handoff_id), store=order.store)
        return replace(memory, record=record)

    async def _persist(self, slot: int) -> None:
        data = to_json(self._memories[slot])
        key = str(SlotKey(self._job_id, slot))
        await asyncio.to_thread(self._node.journal.put, Table.PARTICIPANT, key, data)

    async def _prepare(self, slot: int, order: Order) -> None:
        assert order.source is not None, "orders without a source are refused at the edge"
        active = self.participants[slot].record.active
        # The rank of a world that only starts may still wait for the process before it: then it is no newcomer.
        is_born = active is not None and self._host.awaits(slot, active.generation)
        if not self._host.is_busy(slot) or (self._host.is_condemned(slot) and not is_born):
            launch = self._newcomer(slot, order)
            if launch is None:
                await self.feed(slot, RankDied(Reason("the job file has not come from the service yet", "prepare")))
                return
            self._host.launch(launch)
        relay = self._relay_of(order) or None
        await self._host.tell(slot, Prepare(order=order, clock_zero=self._node.clock.zero, relay=relay))

    async def _start(self, slot: int, order: Order) -> None:
        spec = self._spec_of()
        if spec is None:
            await self.feed(slot, RankDied(Reason("the job file has not come from the service yet", "start")))
            return
        name = f"{slot}-{order.generation}-{order.handoff_id[:4]}"
        launch = Launch(self._node.rank_spec(slot, order, spec, name), order.handoff_id)
        _log.info("job %s: starting rank %d of generation %d", self._job_id, launch.spec.rank, order.generation)
        if self._host.is_busy(slot):
            self._host.end(slot, f"generation {order.generation} starts", 0.0)  # Of no world; it has not ended yet.
        self._host.launch(launch)

    def _newcomer(self, slot: int, order: Order) -> Launch | None:
        spec = self._spec_of()
        if spec is None or Member(self._node.node_id, slot) not in order.target.members:
            return None
        return Launch(self._node.rank_spec(slot, order, spec, f"{slot}-{order.generation}"), order.handoff_id)

    async def _abort(self, slot: int, handoff_id: HandoffId, reason: Reason) -> None:
        if not self._host.is_busy(slot):
            await self.feed(slot, RankDied(Reason(NO_PROCESS, "abort", cause=ENDED_UNSEEN)))
            return
        self._aborting_since.setdefault(slot, self._node.now())
        await self._host.tell(slot, Abort(handoff_id=UUID(handoff_id), reason=reason))
        if self.participants[slot].record.active is None:
            self._host.condemn(slot)

    async def _end_stuck_abort(self, slot: int, participant: Participant, now: float) -> None:
        """A newcomer that does not go when it is told to is ended; a rank with a world is left to its deadline."""
        if participant.state is not ParticipantState.ABORTING:
            self._aborting_since.pop(slot, None)
            return
        since = self._aborting_since.get(slot, now)
        if participant.record.active is None and now - since > ABORT_GRACE_S:
            self._aborting_since.pop(slot, None)
            self._host.end(slot, "did not end after an abort", 0.0)


def _in_world(hello: Hello) -> RankReported:
    """A rank that steps in a world and says nothing of a handoff; one that only starts steps in none."""
    generation = 0 if hello.stage is RankStage.STARTING else hello.generation
    return RankReported(HandoffId(""), generation, RankStage.TRAINING)
