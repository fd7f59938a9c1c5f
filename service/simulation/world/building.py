"""Building the target world after a rescue has released its leavers: all of its ranks, or nobody. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from liver_core.handoff import FailedPart, FailureCause, Order, Reason
from liver_core.handoff.cutover import TargetBuilt
from service.simulation.world.parts import RankInPause
from service.simulation.world.surroundings import Surroundings

if TYPE_CHECKING:
    from liver_core.handoff import Cutover
    from liver_core.layout import Member

ANSWER_S = 0.2


class Building:
    """One per target of a rescue. Who fails says so in the store, as far as it can."""

    def __init__(self, simulation: Surroundings, order: Order) -> None:
        self.simulation = simulation
        self.order = order
        self.entered: dict[Member, tuple[RankInPause, Cutover | None]] = {}
        self.entered_at: dict[Member, float] = {}
        self.arrived: set[Member] = set()
        self.known_at = math.inf  # by then every rank that lives knows that all have arrived
        self.disturbed = False  # something that is no fault of the machines is in the way

    def enter(self, rank: RankInPause) -> None:
        """`rank` knows that the leavers are released."""
        sim = self.simulation
        self.entered[rank.member], self.entered_at[rank.member] = (rank, rank.cutover), sim.clock.now
        if sim.conditions.takes_fault("build fails", rank.member):
            self.disturbed = True
            self._fail(Reason("the build failed", "build", rank.cutover_rank), rank)
            return
        build_s = sim.conditions.build_s(rank.member)
        self.disturbed = self.disturbed or build_s > self.order.cutover.build_s
        sim.clock.after(build_s, self._arrive, rank)

    def _arrive(self, rank: RankInPause) -> None:
        if not rank.alive:
            return
        self.arrived.add(rank.member)
        if len(self.arrived) < len(self.order.target.members):
            return
        gone = [member for member, (each, _) in self.entered.items() if not each.alive]
        if gone:
            self.disturbed = True
            self._fail(
                Reason(f"{gone[0]} is gone", "build", rank.cutover_rank, cause=FailureCause(FailedPart.PEER)), rank
            )
            return
        self.known_at = self.simulation.clock.now + 0.01 + ANSWER_S
        for each, machine in self.entered.values():
            each.take_what_survivors_hold(self.order)
            delay_s = 0.01 + ANSWER_S * self.simulation.draw()
            self.simulation.clock.after(delay_s, each.answer, machine, TargetBuilt())

    def _fail(self, reason: Reason, first: RankInPause) -> None:
        """Whoever fails knows it; the others hear of it now and then, else their own limit ends it."""
        for rank, machine in self.entered.values():
            if rank is first or self.simulation.draw() < 0.5:
                told = reason if rank is first else _missing(reason, rank)
                self.simulation.clock.after(0.05, rank.answer, machine, TargetBuilt(told))


def _missing(reason: Reason, rank: RankInPause) -> Reason:
    """What one says that has only read that another one failed."""
    return replace(reason, rank=rank.cutover_rank, cause=FailureCause(FailedPart.PEER))
