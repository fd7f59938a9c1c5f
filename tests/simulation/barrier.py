"""Where the targets of one handoff vote on what they hold. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liver_core.handoff import Cutover, Order, Reason, Rung
from liver_core.handoff.cutover import BarrierFailed, BarrierPassed, Level
from liver_core.layout import Member
from tests.simulation.truth import voters

if TYPE_CHECKING:
    from tests.simulation.ranks import SimRank
    from tests.simulation.simulation import Simulation


class Barrier:
    """The MIN over the target world of one handoff, or over the survivors; each rank may see it fail on its own."""

    def __init__(self, simulation: Simulation, order: Order) -> None:
        self.simulation = simulation
        self.order = order
        self.levels: dict[Member, Level] = {}
        self.ranks: dict[Member, SimRank] = {}
        self.machines: dict[Member, Cutover | None] = {}
        self.members = voters(order)

    def count_in(self, rank: SimRank) -> None:
        """The part of a rank that holds everything is here, but the result does not reach it."""
        self.levels[rank.member] = Level.EVERYTHING
        self._complete()

    def enter(self, rank: SimRank, level: Level, until: float) -> None:
        if rank.member in self.levels:
            self.simulation.clock.after(0.1, self._timed_out, rank)
            return
        self.levels[rank.member] = level
        self.ranks[rank.member] = rank
        self.machines[rank.member] = rank.cutover
        clock = self.simulation.clock
        clock.after(max(0.0, until - clock.now), self._timed_out, rank)
        self._complete()

    def _complete(self) -> None:
        if len(self.levels) < len(self.members):
            return
        clock, level = self.simulation.clock, min(self.levels.values())
        for peer in self.ranks.values():
            if self.simulation.takes_fault("barrier fails", peer.member):
                clock.after(0.1, self._timed_out, peer)
            else:
                delay_s = 0.01 + 0.2 * self.simulation.random.random()
                if self.order.rung is Rung.RESCUE and self.simulation.chance(0.1):
                    delay_s += 3.0 * self.simulation.random.random()  # It votes through the store, which may be slow.
                clock.after(delay_s, peer.answer, self.machines[peer.member], BarrierPassed(level))

    def _timed_out(self, rank: SimRank) -> None:
        missing = [member for member in self.members if member not in self.levels]
        name = f"{missing[0]} did not come" if missing else "the collective failed"
        event = BarrierFailed(Reason(name, "barrier", rank.cutover_rank))
        rank.answer(self.machines.get(rank.member, rank.cutover), event)
