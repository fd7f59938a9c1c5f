"""The store of one target generation: compare-and-set on the decision record, over a connection that may fail. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liver_core.handoff import Decision, Order, Reason
from liver_core.handoff.cutover import BoundaryAgreed, DecisionRead, StoreUnreachable

if TYPE_CHECKING:
    from liver_core.handoff import Cutover
    from tests.simulation.ranks import SimRank
    from tests.simulation.simulation import Simulation

TIMEOUT_S = 0.7


class SimStore:
    """One per handoff. Once dead it stays dead; a rank may be cut off from it for a while."""

    def __init__(self, simulation: Simulation, order: Order) -> None:
        self.simulation = simulation
        self.order = order
        self.alive = True
        self.record = Decision.UNDECIDED
        self.version = 0  # the version that the cutover is about, for the checks
        self.boundary: BoundaryAgreed | None = None  # for newcomers
        self.cut_off: dict[str, float] = {}  # node -> until

    def ask(self, rank: SimRank, machine: Cutover | None, wish: Decision) -> None:
        """Compare-and-set `undecided -> wish`; a wish of UNDECIDED only reads."""
        sim = self.simulation
        if not self.reaches(rank) or sim.random.random() < sim.network.loss:
            self._fail(rank, machine)
            return
        sim.clock.after(0.01 + 0.1 * sim.random.random(), self._serve, rank, machine, wish)

    def _serve(self, rank: SimRank, machine: Cutover | None, wish: Decision) -> None:
        sim = self.simulation
        if not self.alive:
            self._fail(rank, machine)
            return
        if self.record is Decision.UNDECIDED and wish is not Decision.UNDECIDED:
            self.record = wish
            sim.note(f"decision of {self.order.handoff_id}: {wish} (by {rank.member.node_id})")
            sim.truth.decided(self.order, wish, sim.target_ranks(self.order), self.version)
        # The answer may get lost although the write was done.
        if not self.reaches(rank) or sim.random.random() < sim.network.loss:
            self._fail(rank, machine)
            return
        sim.clock.after(0.01 + 0.1 * sim.random.random(), rank.answer, machine, DecisionRead(self.record))

    def reaches(self, rank: SimRank) -> bool:
        """Whether the rank would get an answer now."""
        return self.alive and self.cut_off.get(rank.member.node_id, 0.0) <= self.simulation.clock.now

    def _fail(self, rank: SimRank, machine: Cutover | None) -> None:
        reason = Reason("the store does not answer", "decision", rank=rank.cutover_rank)
        sim = self.simulation
        # A machine that is reached says that the process has ended; one that is not says nothing.
        gone = not self.alive and sim.random.random() < 0.5
        sim.clock.after(TIMEOUT_S, rank.answer, machine, StoreUnreachable(reason, gone))
