"""The service's list of handoffs, and how the hosts of proposers tell it of theirs. Pure.

As `agent.driver.mirrors` and `service.handoffs.operations` do it: each news of a handoff is a copy with a higher
number, kept on the host's disk and sent until the service has taken it. Which copy is newer is decided by
`service.handoffs.rules`, what a host that was killed has not told by `agent.driver.progress.untold_ends`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from agent.driver import progress
from agent.protocol.values import HandoffState
from liver_core.handoff import Phase, ProposerRecord
from liver_core.handoff.proposer_events import HandoffEnded
from service.handoffs import rules
from tests.simulation.truth import Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

SHARE_OF_CRASHES = 0.05
SYNC_S, QUIET_S, NEWS_S = 0.5, 40.0, 10.0
"""The service gives up an open handoff of which it hears nothing for QUIET_S; hosts tell of one every NEWS_S."""
_PHASES = {Phase.PERMIT: HandoffState.READY, Phase.WITHDRAW: HandoffState.READY, Phase.RETIRE: HandoffState.ACTIVE}


@dataclass(frozen=True, slots=True)
class Mirror:
    """One copy of a handoff, as its host has it."""

    handoff_id: str
    generation: int
    copy: rules.Copy
    reason: str
    is_final: bool = False


@dataclass(slots=True)
class Row:
    """A handoff in the list; `generation` None: not known, or another has the number."""

    mirror: Mirror
    generation: int | None
    changed_at: float

    @property
    def is_open(self) -> bool:
        """Whether it may still become active."""
        return rules.is_open(self.mirror.copy.state)


class Listing:
    """The rows of one job, by handoff."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.random = Random(f"listing of {simulation.seed}")
        self.rows: dict[str, Row] = {}

    def begin(self) -> None:
        """Hosts tell of their handoffs from now on."""
        self.look()
        for host in self.simulation.hosts.values():
            host.mirrors.sync()

    def crashes_now(self) -> bool:
        """Whether a host dies when it has kept the first mirror of a handoff, and not yet the proposal; or the end of
        it, and not yet told it."""
        sim = self.simulation
        return sim.chaos and bool(sim.plan.faults) and self.random.random() < SHARE_OF_CRASHES

    def take(self, mirror: Mirror) -> None:
        """One copy, which may be old."""
        row = self.rows.get(mirror.handoff_id)
        if row is not None:
            has_number = row.generation is not None
            if not rules.replaces(mirror.copy, row.mirror.copy, has_number=has_number):
                return
        is_aborted = mirror.copy.state is HandoffState.ABORTED
        other = self._holder(mirror)
        if other is not None and (is_aborted or other.mirror.copy.state is HandoffState.ACTIVE):
            if is_aborted:
                self.rows[mirror.handoff_id] = Row(mirror, None, self.simulation.clock.now)
            return
        if other is not None:
            other.generation = None
            if other.is_open:
                self._drop(other, f"generation {mirror.generation} now belongs to handoff {mirror.handoff_id}")
        self.rows[mirror.handoff_id] = Row(mirror, mirror.generation, self.simulation.clock.now)

    @property
    def is_settled(self) -> bool:
        """Whether no row is open, and no host has anything left to tell."""
        waiting = any(host.mirrors.waiting for host in self.simulation.hosts.values() if not host.gone)
        return not waiting and not any(row.is_open for row in self.rows.values())

    def look(self) -> None:
        """The service gives up what nobody tells of any more."""
        self.simulation.clock.after(1.0, self.look)
        self.drop_open(f"no report of it for {QUIET_S:.0f} s", quiet_s=QUIET_S)

    def drop_open(self, reason: str, *, quiet_s: float = 0.0) -> None:
        """End what is open, and of which nothing was heard for so long."""
        now = self.simulation.clock.now
        for row in self.rows.values():
            if row.is_open and now - row.changed_at >= quiet_s:
                self._drop(row, reason)

    def check(self) -> None:
        """Everybody hears each other again, and nothing waits: each attempt is there, and as its proposer knows it."""
        for handoff_id, proposer in self.simulation.truth.attempts.items():
            # A host that is gone for good may have told nobody.
            if handoff_id not in self.rows and not self.simulation.hosts[proposer].gone:
                raise Violation(f"hidden attempt: the service's list has no {handoff_id}")
        for host in self.simulation.hosts.values():
            if host.gone:
                continue  # Its handoffs were given up, for a reason of the service's own.
            known = {str(ended.handoff_id): ended for ended in host.journal.ended}
            for handoff_id, kept in host.mirrors.kept.items():
                truth, said = known.get(handoff_id), self.rows[handoff_id].mirror
                is_told = kept.is_final and (said.copy.state, said.reason) == (kept.copy.state, kept.reason)
                if truth is not None:  # Of the newest; else it was never opened, or has been told long ago.
                    is_told &= (said.copy.state, said.reason) == (progress.state_of_end(truth), truth.reason.text)
                if not is_told:
                    raise Violation(
                        f"hidden outcome: {handoff_id} ended {kept.copy.state}: {kept.reason!r} ({truth}), "
                        f"the service has {said.copy.state}: {said.reason!r}"
                    )

    def _holder(self, mirror: Mirror) -> Row | None:
        found = (row for key, row in self.rows.items() if key != mirror.handoff_id)
        return next((row for row in found if row.generation == mirror.generation), None)

    def _drop(self, row: Row, reason: str) -> None:
        aborted = replace(row.mirror.copy, state=HandoffState.ABORTED)
        row.mirror, row.changed_at = replace(row.mirror, copy=aborted, reason=reason), self.simulation.clock.now


class Mirrors:
    """What one host of a proposer has to tell. `kept` is on its disk, `waiting` in its memory."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation = simulation
        self.name = name
        self.kept: dict[str, Mirror] = {}
        self.waiting: dict[str, Mirror] = {}
        self.said_at = 0.0

    def say(self, mirror: Mirror) -> None:
        """The next copy."""
        before = self.kept.get(mirror.handoff_id)
        number = 1 if before is None else before.copy.mirror_seq + 1
        mirror = replace(mirror, copy=replace(mirror.copy, mirror_seq=number))
        self.kept[mirror.handoff_id] = self.waiting[mirror.handoff_id] = mirror
        self.said_at = self.simulation.clock.now

    def say_record(self, record: ProposerRecord) -> None:
        """The same of the open handoff, as its proposer stands."""
        if record.proposal is not None:
            state = _PHASES.get(record.phase, HandoffState.PREPARING)
            text = record.reason.text if record.reason is not None else "open"
            copy = rules.Copy(state, record.plan_revision, 0)
            self.say(Mirror(record.proposal.handoff_id, record.generation, copy, text))

    def say_ended(self, ended: HandoffEnded) -> None:
        """How one ended."""
        before = self.kept[ended.handoff_id]
        copy = replace(before.copy, state=progress.state_of_end(ended))
        self.say(replace(before, copy=copy, reason=ended.reason.text, is_final=True))

    def lose_memory(self) -> None:
        """The host was killed."""
        self.waiting.clear()

    def restore(self, record: ProposerRecord) -> None:
        """What was kept is sent again, and what had ended by then is told."""
        self.waiting = dict(self.kept)
        open_id = None if record.proposal is None else record.proposal.handoff_id
        unfinished = [name for name, mirror in self.kept.items() if not mirror.is_final]
        for ended in progress.untold_ends(unfinished, record.ended, open_id=open_id):
            self.say_ended(ended)

    def sync(self) -> None:
        """One exchange with the service, over TCP: what gets lost comes late."""
        sim, host = self.simulation, self.simulation.hosts[self.name]
        sim.clock.after(SYNC_S * (0.8 + 0.4 * sim.listing.random.random()), self.sync)
        if not host.up or sim.network.service_away:
            return
        if sim.clock.now - self.said_at > NEWS_S:
            self.say_record(host.journal)
        for mirror in self.waiting.values():
            sim.clock.after(self._delay_s(), self._arrive, mirror)

    def _arrive(self, mirror: Mirror) -> None:
        if not self.simulation.network.service_away:
            self.simulation.listing.take(mirror)
            self.simulation.clock.after(self._delay_s(), self._acknowledge, mirror)

    def _acknowledge(self, mirror: Mirror) -> None:
        if self.waiting.get(mirror.handoff_id) is mirror:
            del self.waiting[mirror.handoff_id]

    def _delay_s(self) -> float:
        return 0.01 + 4.0 * self.simulation.network.delay_s * self.simulation.listing.random.random()
