"""A rank of this node has died: the other ranks of its worlds are told, on this node and on others.

What waits for a dead rank on a GPU waits for ever, and what misses one over the network learns no name. So each agent
says of its own ranks, and of no others, that they are dead. Nothing is inferred where that does not come.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from agent.protocol.peer import DeathBody
from agent.protocol.rank import PeerDied, StageReport
from liver_core.handoff import FailedPart, Participant, Reason
from liver_core.layout import Member

GENERATIONS_KEPT = 64
_log = logging.getLogger(__name__)


class Deaths:
    """Of one job on the node `node_id`. `participants`: those of this node, by slot. `send`: to the agent of a node, by
    a subject of which only the newest matters. `say`: to every rank here; which of its worlds is meant it knows best.
    """

    def __init__(
        self,
        node_id: str,
        participants: Mapping[int, Participant],
        *,
        send: Callable[[str, DeathBody, str], None],
        say: Callable[[PeerDied], Awaitable[None]],
    ) -> None:
        self._node_id = node_id
        self._participants = participants
        self._send = send
        self._say = say
        self._known: deque[int] = deque(maxlen=GENERATIONS_KEPT)

    async def tell_broken(self, slot: int, said: StageReport) -> None:
        """The rank of this slot says that it can go on in no world: its process makes no step any more, and ends."""
        reason = said.reason or Reason("it cannot go on in any world", "cutover", said.rank)
        await self.tell(slot, reason.as_felt())

    async def tell(self, slot: int, reason: Reason) -> None:
        """The process of this slot has ended, and nobody had told it to. Where it only missed another rank of a world
        whose loss is known here, the other nodes have heard of that: all ranks of a world end so after one death."""
        member = Member(self._node_id, slot)
        is_felt = reason.cause is not None and reason.cause.what is FailedPart.PEER
        participant = self._participants.get(slot)
        for roster, node_ids in () if participant is None else participant.record.worlds_without(member):
            here = replace(reason, rank=roster.rank_of(member), node=self._node_id)
            death = PeerDied(generation=roster.generation, member=member, reason=here)
            if not (is_felt and roster.generation in self._known):
                self._known.append(roster.generation)
                for node_id in node_ids:
                    if node_id != self._node_id:
                        self._send(node_id, DeathBody(death=death), f"death/{slot}/{roster.generation}")
            await self._say(death)

    def work_of(self, sender: str, death: PeerDied) -> Callable[[], Awaitable[None]]:
        """What is to be done about the word of another agent. Raises ValueError where it is not of its own rank."""
        if death.member.node_id != sender:
            raise ValueError(f"death.member: must be a rank of the sender {sender}, is of {death.member.node_id}")
        return lambda: self._take(death)

    async def _take(self, death: PeerDied) -> None:
        text = "generation %d has lost rank %s on %s: %s"
        _log.warning(text, death.generation, death.reason.rank, death.member.node_id, death.reason.text)
        self._known.append(death.generation)
        await self._say(death)
