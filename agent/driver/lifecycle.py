"""Worlds that the service starts (first start, checkpoint rung), and jobs that it stops or suspends.

The participant machine gives up what is older, and then starts the rank. A rank that died is not started again here:
the service decides what follows and starts a new generation.
"""

import logging
import os
import time
from datetime import datetime

from agent.driver.lead import Lead
from agent.driver.node_context import Node
from agent.driver.participants import NO_PROCESS, JobSlots
from agent.driver.rank_host import STOP_GRACE_S, RankHost
from agent.link.lone_suspension import LoneSuspension
from agent.protocol.rank import WriteCheckpoint
from agent.protocol.sources import SourceCheckpoint, SourceHandoff
from agent.protocol.sync import DesiredState, JobOrder, RankStatus
from agent.protocol.values import HandoffCause
from agent.supervisor.records import StoreKey
from agent.supervisor.stores import StoreError
from liver_core.handoff import (
    FailedPart,
    FailureCause,
    Order,
    RankStage,
    Reason,
    Stage,
    StoreAddress,
    start_order,
)
from liver_core.handoff.generations import first_of
from liver_core.handoff.participant_events import ENDED_UNSEEN
from liver_core.layout import Member, Roster

START_DEADLINE_S = 240.0
MISSING_RANK_S = 15.0
STEPS_GRACE = 4
"""Steps that a rank may take until it has learned that it should end and has ended."""
CHECKPOINT_GRACE_S = 120.0
"""How much longer than a step a rank may take to end if it writes a checkpoint."""
_BY_STORE = FailureCause(FailedPart.STORE)
_log = logging.getLogger(__name__)


class Births:
    """Of one job."""

    def __init__(self, node: Node, job_id: str, slots: JobSlots, host: RankHost, lead: Lead) -> None:
        self._node = node
        self._job_id = job_id
        self._slots = slots
        self._host = host
        self._lead = lead
        self._ending = False
        self._ended_alone: dict[int, tuple[int, int]] = {}
        self._missing_since: float | None = None
        self._said = ""
        self.alone = LoneSuspension(
            node.node_id,
            job_id,
            now=node.now,
            heard_ago=lambda: time.monotonic() - node.service_heard_at(),
            tell=lambda name, body: node.peers.send_newest(node.envelope(job_id, name, body), "suspension", attempts=1),
        )

    def wanted(self, order: JobOrder) -> DesiredState:
        """What the job is to be now. A suspension whose time has come leaves a handoff alone: it may save the job."""
        if order.desired is not DesiredState.RUN:
            return order.desired
        at = order.suspends_utc or self._suspends_alone(order)
        if at is None:
            return DesiredState.RUN
        is_due = self._node.now() >= at.timestamp()
        is_free = self._ending or (self._lead.is_idle and not self._slots.is_bound())
        return DesiredState.SUSPENDED if is_due and is_free else DesiredState.RUN

    def _suspends_alone(self, order: JobOrder) -> datetime | None:
        """When the agents end the world that is here, or whose ranks they have just ended; no newer start is meant."""
        active = self._slots.active()
        ended = max((generation for _, generation in self._ended_alone.values()), default=0)
        here = ended if active is None else active.generation
        return self.alone.at(here) if here >= (order.generation or 0) else None

    async def consider(self, order: JobOrder, lost: dict[int, RankStatus]) -> None:
        """Bring this node's ranks to what the service wants. Idempotent."""
        self.alone.tick()
        match self.wanted(order):
            case DesiredState.STOP:
                await self._wind_down(order, "the job is stopped")
            case DesiredState.SUSPENDED if order.desired is DesiredState.RUN and order.suspends_utc is None:
                await self._end_alone(order, lost)
            case DesiredState.SUSPENDED:
                await self._wind_down(order, "the job is suspended")
            case DesiredState.RUN:
                self._ending, self._ended_alone = False, {}
                await self._run(order, lost)
                if order.checkpoint_asked:
                    await self._host.ask_checkpoint(WriteCheckpoint(number=order.checkpoint_asked))

    async def take_store_death(self, generation: int, lost: dict[int, RankStatus]) -> None:
        """The store that this node keeps of a world died. A handoff to that world cannot be decided any more. Ranks of
        a start that have yet to meet there would wait in vain for longer than a start takes: they are lost at once."""
        await self._lead.take_store_death(generation)
        text = f"the store of generation {generation} on node {self._node.node_id} died"
        for slot, rank in self._slots.starting_in(generation).items():
            _log.warning("job %s: %s before rank %d had met the others there", self._job_id, text, rank)
            lost[slot] = self.lost_rank(slot, rank, generation, Reason(text, "start", rank, cause=_BY_STORE))
            self._host.end(slot, text, 0.0)
        self._node.sync_soon()

    def lost_rank(self, slot: int, rank: int, generation: int, reason: Reason) -> RankStatus:
        """What is reported of a rank that is no more, or never was."""
        return RankStatus(
            job_id=self._job_id,
            generation=generation,
            rank=rank,
            slot=slot,
            pid=os.getpid(),
            stage=RankStage.FAILED,
            reason=reason,
        )

    async def _run(self, order: JobOrder, lost: dict[int, RankStatus]) -> None:
        if order.generation is None or order.roster is None or order.source is None or order.origin_id is None:
            return
        roster = order.roster
        mine = [member.slot for member in roster.members if member.node_id == self._node.node_id]
        self._note_missing(order, roster, mine, lost)
        # Older worlds are given up before the newer one has a store, wherever that is. Who was away while the service
        # started it hears only of a handoff that followed.
        follows = isinstance(order.source, SourceHandoff)
        started = first_of(order.generation) if follows else order.generation
        await self._slots.give_up(started)
        await self._lead.give_way(started)
        if follows:
            return
        store = await self._store_for(order, roster)
        for slot in mine:
            if store is not None and self._is_due(slot, order):
                await self._slots.take_start(slot, self._first_order(order, roster, store))

    def _is_due(self, slot: int, order: JobOrder) -> bool:
        """Whether this slot has not heard of the start, nor of anything newer."""
        return order.generation is not None and order.generation > self._slots.memory(slot).record.highest_generation

    async def _store_for(self, order: JobOrder, roster: Roster) -> StoreAddress | None:
        """The store where the ranks of this birth meet: hosted here if the start says so, else told by orders. Who
        hosts it never depends on what this agent knows: two stores of one start are two halves that never meet."""
        assert order.generation is not None
        if (order.store_node or roster.node_ids()[0]) != self._node.node_id:
            return order.store
        key = StoreKey(self._job_id, order.generation)
        known = self._node.stores.address(key)
        if known is not None or not any(
            self._is_due(member.slot, order) for member in roster.members if member.node_id == self._node.node_id
        ):
            return known
        try:
            store = await self._node.stores.host(key, self._node.private_address)
        except StoreError as error:
            self._say(f"the store of generation {order.generation} cannot be hosted: {error}")
            return None
        self._node.sync_soon()
        return store

    def _first_order(self, order: JobOrder, roster: Roster, store: StoreAddress) -> Order:
        """What the ranks of a birth are asked to build: the world of `roster` without a source."""
        now = self._node.now()
        checkpoint = order.source.path if isinstance(order.source, SourceCheckpoint) else ""
        return start_order(
            roster,
            store,
            str(order.origin_id),
            deadline_utc=now + START_DEADLINE_S,
            issued_at=now,
            proposer_id=self._node.node_id,
            cause=HandoffCause.CHECKPOINT if checkpoint else HandoffCause.START,
            checkpoint=checkpoint,
            later=order.later,
        )

    def _note_missing(self, order: JobOrder, roster: Roster, mine: list[int], lost: dict[int, RankStatus]) -> None:
        """The service believes in ranks that this node does not have: say so, never start them again."""
        missing = [slot for slot in mine if slot not in lost and self._is_missing(slot, order, roster.generation)]
        if not missing or self._slots.is_bound():
            self._missing_since = None
            return
        now = self._node.now()
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since < MISSING_RANK_S:
            return
        for slot in missing:
            rank = roster.members.index(Member(self._node.node_id, slot))
            reason = Reason(NO_PROCESS, "adopt", rank, cause=ENDED_UNSEEN)
            lost[slot] = self.lost_rank(slot, rank, roster.generation, reason)
        self._node.sync_soon()

    def _is_missing(self, slot: int, order: JobOrder, generation: int) -> bool:
        memory = self._slots.memory(slot)
        if self._host.is_busy(slot) or memory.record.active is not None:
            return False
        if any(ended.stage is Stage.LEFT and ended.generation > generation for ended in memory.record.ended):
            return False  # It has left by a handoff that the service has not seen become active yet.
        # One of a world that the service starts may still be to be started.
        return isinstance(order.source, SourceHandoff) or memory.origin == str(order.origin_id)

    async def _end_alone(self, order: JobOrder, lost: dict[int, RankStatus]) -> None:
        """The agents suspend the job, and the service does not know. When it is heard again it is told what became of
        the ranks; it takes them for lost, and their last step is saved."""
        if not self._ending:
            states = self._host.states().items()
            self._ended_alone = {slot: (state.rank, state.generation) for slot, state in states}
        reason = self.alone.reason
        await self._wind_down(order, reason.text)
        if self._host.busy():
            return
        for slot, (rank, generation) in self._ended_alone.items():
            lost[slot] = self.lost_rank(slot, rank, generation, reason)
        self._ended_alone = {}
        self.alone.end()
        self._node.sync_soon()

    async def _wind_down(self, order: JobOrder, reason: str) -> None:
        """Have the ranks end after their step. They write a checkpoint first, if the job has a place for it. A rank
        may still be started after that: for a start or a handoff that was on its way."""
        is_news, self._ending = not self._ending, True
        saves = order.saves_at_end or (order.desired is DesiredState.RUN and order.spec.checkpoint is not None)
        if is_news:
            await self._lead.cancel(Reason(reason, "cancel"))
        for slot in self._host.busy() if is_news else self._host.lasting():
            state = self._host.state(slot)
            grace_s = max(STOP_GRACE_S, STEPS_GRACE * (state.pulse.median_s() if state is not None else 0.0))
            self._host.end(slot, reason, grace_s + (CHECKPOINT_GRACE_S if saves else 0.0))

    def _say(self, text: str) -> None:
        if text != self._said:
            _log.warning("job %s: %s", self._job_id, text)
        self._said = text
