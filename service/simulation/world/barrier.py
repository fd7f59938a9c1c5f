"""Where the targets of one handoff vote on what they hold. Pure."""

from __future__ import annotations

from liver_core.handoff import Cutover, FailedPart, FailureCause, Order, Reason, Rung
from liver_core.handoff.cutover import BarrierFailed, BarrierPassed, Level
from liver_core.layout import Member
from service.simulation.world.observer import voters
from service.simulation.world.parts import RankInPause
from service.simulation.world.surroundings import Surroundings


class Barrier:
    """The MIN over the target world of one handoff, or over the survivors; each rank may see it fail on its own."""

    def __init__(self, simulation: Surroundings, order: Order) -> None:
        self.simulation = simulation
        self.order = order
        self.levels: dict[Member, Level] = {}
        self.ranks: dict[Member, RankInPause] = {}
        self.machines: dict[Member, Cutover | None] = {}
        self.members = voters(order)
        self.answered: set[Member] = set()

    def count_in(self, rank: RankInPause) -> None:
        """The part of a rank that holds everything is here, but the result does not reach it."""
        self.levels[rank.member] = Level.EVERYTHING
        self._complete()

    def enter(self, rank: RankInPause, level: Level, until: float) -> None:
        if rank.member in self.levels:
            self.simulation.clock.after(0.1, self._timed_out, rank)
            return
        self.levels[rank.member] = level
        self.ranks[rank.member] = rank
        self.machines[rank.member] = rank.cutover
        clock = self.simulation.clock
        clock.after(max(0.0, until - clock.now), self._timed_out, rank)
        self._complete()
        missing = [member for member in self.members if member not in self.levels]
        if any(rank.knows_dead((member,)) for member in missing):
            self.simulation.clock.after(0.02, self._timed_out, rank)

    def _complete(self) -> None:
        if len(self.levels) < len(self.members):
            return
        clock, level = self.simulation.clock, min(self.levels.values())
        for peer in self.ranks.values():
            if self.simulation.conditions.takes_fault("barrier fails", peer.member):
                clock.after(0.1, self._timed_out, peer)
            else:
                delay_s = 0.01 + 0.2 * self.simulation.draw()
                if self.order.rung is Rung.RESCUE and self.simulation.conditions.chance(0.1):
                    delay_s += 3.0 * self.simulation.draw()  # It votes through the store, which may be slow.
                clock.after(delay_s, peer.answer, self.machines[peer.member], BarrierPassed(level))

    def hear_of_death(self, rank: RankInPause, dead: Member) -> None:
        """`rank` is told that another one is dead: it waits for it no more."""
        waits = rank.member in self.ranks and rank.member not in self.answered
        if waits and dead in self.members and dead not in self.levels:
            self._timed_out(rank)

    def _timed_out(self, rank: RankInPause) -> None:
        missing = [member for member in self.members if member not in self.levels]
        name = f"{missing[0]} did not come" if missing else "the collective failed"
        self.answered.add(rank.member)
        event = BarrierFailed(Reason(name, "barrier", rank.cutover_rank, cause=FailureCause(FailedPart.PEER)))
        rank.answer(self.machines.get(rank.member, rank.cutover), event)
