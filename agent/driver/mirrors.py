"""What the service is told of the handoffs that were led here: the open one, and those that ended last.

Each news makes a new mirror, which waits for the service in the outbox and is kept in the journal.
"""

import asyncio
from collections.abc import Iterable
from uuid import UUID

from agent.driver.journal_records import keep_mirror
from agent.driver.node_context import Node
from agent.driver.progress import ENDS, Progress, cost_of, from_mirror
from agent.journal import Table
from agent.link.relay import Relay
from agent.peer.peer_client import PeerUnreachable
from agent.protocol.handoff_ends import state_of_end, untold_ends
from agent.protocol.peer import FactsBody
from agent.protocol.sync import HandoffMirror
from agent.protocol.values import HandoffState
from liver_core.handoff import HandoffId, MeasuredCost, ProposerRecord
from liver_core.handoff.proposer_events import HandoffEnded
from liver_core.handoff.rung_costs import newest

ENDED_MAX = 8
COSTS_MAX = 64
"""The newest of each rung are taken; one that is rare is not forgotten for the others."""


def relay_of(node: Node, job_id: str) -> Relay:
    """What passes facts of this job on to peers, this node's mirrors among them."""

    async def send(name: str, facts: FactsBody) -> bool:
        try:
            await node.peers.send(node.envelope(job_id, name, facts))
        except PeerUnreachable:
            return False
        return True

    there, parts = node.service_is_there, (node.node_id, job_id, node.outbox, node.journal)
    return Relay(*parts, send=send, keep=keep_mirror, service_is_there=there, now=node.now)


class Mirrors:
    """Of one job on this node. `progress`: of the handoff that is open here, None without one."""

    def __init__(self, node: Node) -> None:
        self.progress: Progress | None = None
        self._node = node
        self._ended: dict[HandoffId, Progress] = {}
        self._told_late: set[str] = set()
        self._costs: dict[UUID, MeasuredCost] = {}

    @property
    def costs(self) -> tuple[MeasuredCost, ...]:
        """What handoffs that were led here cost, newest last."""
        return newest(self._costs.values())

    def restore(self, job_id: str, open_id: HandoffId | None, ended: Iterable[HandoffEnded] = ()) -> None:
        """What the journal kept is sent again, and what had `ended` before the agent could tell it is told."""
        kept = [HandoffMirror.model_validate(data, strict=False) for _, data in self._node.journal.items(Table.HANDOFF)]
        for mirror in sorted(kept, key=lambda each: each.opened_utc):
            if mirror.job_id != job_id:
                continue
            self._node.outbox.put_handoff(mirror)
            self._learn(mirror)
            if str(mirror.handoff_id) == open_id:
                self.progress = from_mirror(mirror)
        mine = {str(each.handoff_id): each for each in kept if self._is_mine(each, job_id)}
        unfinished = [name for name, mirror in mine.items() if mirror.stage not in ENDS]
        for end in untold_ends(unfinished, ended, open_id=open_id):
            progress = from_mirror(mine[end.handoff_id])
            progress.take_end(end)
            # On disk it stays as it was: if the agent is killed again, it tells the same again.
            mirror = progress.next_mirror(state_of_end(end), str(end.stage), self._node.now())
            self._node.outbox.put_handoff(mirror)
            self._told_late.add(end.handoff_id)

    def has_told_late(self, handoff_id: str) -> bool:
        """Whether its end is told since this agent started: it must not be opened any more, if it ever was."""
        return handoff_id in self._told_late

    def _is_mine(self, mirror: HandoffMirror, job_id: str) -> bool:
        return mirror.job_id == job_id and mirror.proposer == self._node.node_id

    def find(self, handoff_id: HandoffId) -> Progress | None:
        """The open handoff or one of those that ended last, if it was led here."""
        if self.progress is not None and str(self.progress.mirror.handoff_id) == handoff_id:
            return self.progress
        return self._ended.get(handoff_id)

    def newest_store(self, *, since: int) -> tuple[str, int] | None:
        """Host and port of the store of the newest world that a handoff led here has made; None where generation
        `since`, which the service knows, has followed it."""
        ended = (item.mirror for item in self._ended.values() if item.mirror.state is HandoffState.ACTIVE)
        active = [mirror for mirror in ended if mirror.generation >= since]
        newest = max(active, key=lambda mirror: mirror.generation, default=None)
        return None if newest is None or newest.store is None else (newest.store.host, newest.store.port)

    def take_step(self, generation: int, step: int) -> None:
        """A rank of this node did a step."""
        for progress in (*self._ended.values(), *([self.progress] if self.progress else [])):
            if progress.lost_time.stepped(generation, progress.mirror.generation, step, self._node.now()):
                progress.is_stale = True

    async def say(self, progress: Progress, state: HandoffState, stage: str) -> None:
        """Make the next mirror of this handoff."""
        mirror = progress.next_mirror(state, stage, self._node.now())
        self._node.outbox.put_handoff(mirror)
        self._learn(mirror)
        self._node.sync_with_progress()
        await asyncio.to_thread(keep_mirror, self._node.journal, mirror)

    def _learn(self, mirror: HandoffMirror) -> None:
        cost = cost_of(mirror)
        if cost is None:
            return
        self._costs[mirror.handoff_id] = cost
        while len(self._costs) > COSTS_MAX:
            del self._costs[next(iter(self._costs))]

    async def say_open(self, record: ProposerRecord) -> None:
        """The same of the open handoff, if there is one, as its proposer stands."""
        if self.progress is not None:
            await self.say(self.progress, self.progress.state_of(record), str(record.phase))

    async def say_stale(self, record: ProposerRecord) -> None:
        """The same of each handoff that has news, and of the open one also where its newest mirror is old."""
        for ended in tuple(self._ended.values()):
            if ended.is_stale:
                await self.say(ended, ended.mirror.state, ended.mirror.stage)
        if self.progress is not None and (self.progress.is_stale or self.progress.is_old(self._node.now())):
            await self.say_open(record)

    async def say_ended(self, handoff_id: HandoffId, progress: Progress, state: HandoffState, stage: str) -> None:
        """A handoff has ended. The newest of these are kept, since steps that follow tell what they cost."""
        self._ended[handoff_id] = progress
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        await self.say(progress, state, stage)
        self._node.sync_soon()
