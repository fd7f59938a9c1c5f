"""The store of one target generation: compare-and-set on the decision record, over a connection that may fail. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from liver_core.handoff import Decision, FailedPart, FailureCause, Order, Reason
from liver_core.handoff.cutover import BoundaryAgreed, DecisionRead, StoreUnreachable
from service.simulation.world.parts import RankInPause
from service.simulation.world.surroundings import Surroundings

if TYPE_CHECKING:
    from liver_core.handoff import Cutover

TIMEOUT_S = 0.7


class SimStore:
    """One per handoff, on the node that leads it. Once dead it stays dead; a rank may be cut off from it."""

    def __init__(self, simulation: Surroundings, order: Order) -> None:
        self.simulation = simulation
        self.order = order
        self.alive = True
        self.died_at = math.inf
        self.record = Decision.UNDECIDED
        self.version = 0  # the version that the cutover is about, for the checks
        self.boundary: BoundaryAgreed | None = None  # for newcomers
        self.cut_off: dict[str, float] = {}  # node -> until

    def ask(self, rank: RankInPause, machine: Cutover | None, wish: Decision) -> None:
        """Compare-and-set `undecided -> wish`; a wish of UNDECIDED only reads."""
        sim = self.simulation
        if not self.reaches(rank) or sim.draw() < sim.network.loss:
            self._fail(rank, machine)
            return
        sim.clock.after(0.01 + 0.1 * sim.draw(), self._serve, rank, machine, wish)

    def _serve(self, rank: RankInPause, machine: Cutover | None, wish: Decision) -> None:
        sim = self.simulation
        if not self.alive:
            self._fail(rank, machine)
            return
        if self.record is Decision.UNDECIDED and wish is not Decision.UNDECIDED:
            self.record = wish
            sim.note(f"decision of {self.order.handoff_id}: {wish} (by {rank.member.node_id})")
            sim.observer.decided(self.order, wish, sim.target_ranks(self.order), self.version)
        # The answer may get lost although the write was done.
        if not self.reaches(rank) or sim.draw() < sim.network.loss:
            self._fail(rank, machine)
            return
        sim.clock.after(0.01 + 0.1 * sim.draw(), rank.answer, machine, DecisionRead(self.record))

    def reaches(self, rank: RankInPause) -> bool:
        """Whether the rank would get an answer now."""
        sim, name, keeper = self.simulation, rank.member.node_id, self.order.proposer_id
        passes = sim.network.passes(name, keeper) and self.cut_off.get(name, 0.0) <= sim.clock.now
        return self.alive and passes and sim.agent(keeper).node_up

    def die(self) -> None:
        """Its process ends, which the agent of its node sees."""
        self.alive, self.died_at = False, self.simulation.clock.now
        keeper = self.simulation.agent(self.order.proposer_id)
        self.simulation.clock.after(0.05, keeper.does, keeper.leading.store_died, self.order.generation)

    def _fail(self, rank: RankInPause, machine: Cutover | None) -> None:
        lost = FailureCause(FailedPart.STORE)
        reason = Reason("the store does not answer", "decision", rank=rank.cutover_rank, cause=lost)
        sim = self.simulation
        # A machine that is reached says that the process has ended; one that is not says nothing.
        gone = not self.alive and sim.draw() < 0.5
        sim.clock.after(TIMEOUT_S, rank.answer, machine, StoreUnreachable(reason, gone))
