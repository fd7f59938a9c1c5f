"""What agents have said of ranks that are dead, and what this rank makes of it.

The word of an agent comes to a thread that takes commands. What waits on the device for a dead rank would wait for
ever, so its communicators are ended from there; the main thread learns of it by the error, or when it looks here. Over
gloo it may know before its agent does, but not which rank it was.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from liver_core.handoff.messages import FailedPart, Reason
from liver_core.layout import Member, Roster
from liver_core.worlds.megatron import MegatronWorld, abandon

DEATHS_KEPT = 64
NAMED_WITHIN_S = 0.4
"""How much later the word of an agent may come than the error of gloo. The end of this process waits for it."""


class PeerGone(RuntimeError):
    """A rank of the world in which this rank trains is dead, by the word of its agent."""


@dataclass(frozen=True, slots=True)
class PeerDeath:
    """`member` had a rank in the world of `generation`, and its process has ended. `reason` names rank, node, and how
    it ended; with the cause PEER it has only missed another rank itself."""

    generation: int
    member: Member
    reason: Reason

    def is_in(self, roster: Roster) -> bool:
        """Whether the world of this roster has lost a rank by it."""
        return self.generation == roster.generation and self.member in roster.members

    @property
    def is_felt(self) -> bool:
        """Whether another rank died first."""
        return self.reason.cause is not None and self.reason.cause.what is FailedPart.PEER

    def __str__(self) -> str:
        return f"rank {self.reason.rank} on {self.member.node_id} is dead: {self.reason.text}"


class PeerDeaths:
    """See the module. Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deaths: deque[PeerDeath] = deque(maxlen=DEATHS_KEPT)

    def note(self, death: PeerDeath, worlds: Iterable[MegatronWorld]) -> None:
        """Keep it, then end the communicators of those `worlds` that have lost a rank by it."""
        with self._changed:
            if death not in self._deaths:
                self._deaths.append(death)
            self._changed.notify_all()
        for world in worlds:
            if death.is_in(world.roster):
                abandon(world, str(death))

    def of(self, *rosters: Roster | None, within_s: float = 0.0) -> PeerDeath | None:
        """The death that ended these worlds: of one that died by itself, or else the first. Waits so long for it."""

        def found() -> list[PeerDeath]:
            return [death for death in self._deaths if any(death.is_in(each) for each in rosters if each is not None)]

        with self._changed:
            self._changed.wait_for(found, within_s)
            return min(found(), key=lambda death: death.is_felt, default=None)

    def said_of(self, *rosters: Roster | None) -> str:
        """Which rank ended these worlds, and how; empty while none is known to have."""
        return str(self.of(*rosters) or "")

    def check(self, world: MegatronWorld) -> None:
        """Raise PeerGone if the world has lost a rank: what came from its device since then may be anything."""
        if said := self.said_of(world.roster):
            raise PeerGone(said)

    def named(self, reason: Reason, *rosters: Roster | None) -> Reason:
        """Why these worlds cannot go on: the rank that they have lost, or `reason` where no agent names one. Where
        `reason` only misses a rank, its agent is waited for a little."""
        misses = reason.cause is not None and reason.cause.what is FailedPart.PEER
        death = self.of(*rosters, within_s=NAMED_WITHIN_S if misses else 0.0)
        if death is None:
            return reason
        dead = death.reason
        return replace(reason, text=str(death), rank=dead.rank, node=death.member.node_id, cause=dead.cause)
