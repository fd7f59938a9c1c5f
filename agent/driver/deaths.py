"""A rank of this node has died: the other ranks of its worlds are told, on this node and on others.

What waits for a dead rank on a GPU waits for ever, and what misses one over the network learns no name. So each agent
says of its own ranks, and of no others, that they are dead. Nothing is inferred where that does not come.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from agent.driver.node_context import Node
from agent.driver.rank_host import RankHost
from agent.protocol.peer import DeathBody
from agent.protocol.rank import PeerDied
from liver_core.handoff import Participant, Reason
from liver_core.layout import Member, Roster

ATTEMPTS = 3
_log = logging.getLogger(__name__)


class Deaths:
    """Of one job. `participants`: those of this node, by slot."""

    def __init__(self, node: Node, job_id: str, host: RankHost, participants: Mapping[int, Participant]) -> None:
        self._node = node
        self._job_id = job_id
        self._host = host
        self._participants = participants

    async def tell(self, slot: int, reason: Reason) -> None:
        """The process of this slot has ended, and nobody had told it to."""
        member = Member(self._node.node_id, slot)
        for roster in worlds_of(self._participants.get(slot), member):
            here = replace(reason, rank=roster.rank_of(member), node=self._node.node_id)
            death = PeerDied(generation=roster.generation, member=member, reason=here)
            others = {other.node_id for other in roster.members} - {self._node.node_id}
            for node_id in sorted(others):
                envelope = self._node.envelope(self._job_id, node_id, DeathBody(death=death))
                self._node.peers.send_newest(envelope, f"death/{slot}/{roster.generation}", attempts=ATTEMPTS)
            await self._say(death)

    def work_of(self, sender: str, death: PeerDied) -> Callable[[], Awaitable[None]]:
        """What is to be done about the word of another agent. Raises ValueError where it is not of its own rank."""
        if death.member.node_id != sender:
            raise ValueError(f"death.member: must be a rank of the sender {sender}, is of {death.member.node_id}")
        return lambda: self._take(death)

    async def _take(self, death: PeerDied) -> None:
        _log.warning("job %s: rank on %s, generation %d: %s", self._job_id, *_named(death))
        await self._say(death)

    async def _say(self, death: PeerDied) -> None:
        """To every rank here: which of its worlds has lost something by it, a rank knows best."""
        await asyncio.gather(*(self._host.say(slot, death) for slot in self._host.states()))


def worlds_of(participant: Participant | None, member: Member) -> tuple[Roster, ...]:
    """The worlds that lose a rank with this member: the one that it steps in, and the one that it prepares."""
    if participant is None:
        return ()
    record = participant.record
    found = (record.active, None if record.order is None else record.order.target)
    return tuple(roster for roster in found if roster is not None and member in roster.members)


def _named(death: PeerDied) -> tuple[str, int, str]:
    return death.member.node_id, death.generation, death.reason.text
