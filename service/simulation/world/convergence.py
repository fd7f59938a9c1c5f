"""What the ranks of one plan revision agree on while the state streams: certified everywhere, or the next rung. Pure.

The verdict is written to the store once, so that all ranks leave with the same; who cannot reach it asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from liver_core.handoff import Order, Reason, Rung
from liver_core.handoff.participant_events import RankStage
from service.simulation.world.parts import Rank
from service.simulation.world.store import SimStore
from service.simulation.world.surroundings import Surroundings

if TYPE_CHECKING:
    from liver_core.layout import Member

ASK_AGAIN_S = 0.5
STREAMING_SHARE = 0.6
"""Of the time to the deadline; whoever has not converged by then asks for the next rung."""


class Convergence:
    """One per revision of a handoff whose state streams."""

    def __init__(self, simulation: Surroundings, order: Order, store: SimStore) -> None:
        self.simulation = simulation
        self.order = order
        self.store = store
        self.converged: set[Member] = set()
        self.verdict: Rung | None = None
        self.reason: Reason | None = None
        self._waiting: list[tuple[Rank, int]] = []

    def enter(self, rank: Rank) -> None:
        """`rank` is built. It streams if it is a target, and waits for the verdict in any case."""
        sim = self.simulation
        number = rank.build_number
        sim.observer.streams(rank)
        self._ask(rank, number)
        if rank.member not in self.order.target.members:
            return
        left_s = self.order.deadline_utc - sim.clock.now
        stream_s = sim.conditions.stream_s(rank.member)
        if stream_s > STREAMING_SHARE * left_s:
            late = Reason("did not converge in time", "stream", rank.cutover_rank)
            sim.clock.after(max(0.0, STREAMING_SHARE * left_s), self._write, rank, number, Rung.STOP_AND_COPY, late)
        else:
            sim.clock.after(stream_s, self._converge, rank, number)

    def _converge(self, rank: Rank, number: int) -> None:
        sim = self.simulation
        if not self._counts(rank, number):
            return
        if sim.conditions.takes_fault("stream aborts", rank.member):
            rank.stream_breaks(
                Reason("a tile could not be read", "stream", rank.cutover_rank, "decoder.layers.0/master")
            )
        elif sim.conditions.takes_fault("stream fails", rank.member):
            text = Reason("the certificate differs", "stream", rank.cutover_rank, "decoder.layers.0/master")
            self._write(rank, number, Rung.STOP_AND_COPY, text)
        else:
            self._write(rank, number, self.order.rung, None)

    def _write(self, rank: Rank, number: int, wish: Rung, reason: Reason | None) -> None:
        """Compare-and-set on the verdict; the rung of the order is written when the last target has converged."""
        sim = self.simulation
        if not self._counts(rank, number):
            return
        if not self.store.reaches(rank):
            sim.clock.after(ASK_AGAIN_S, self._write, rank, number, wish, reason)
            return
        if wish.streams:
            self.converged.add(rank.member)
            if len(self.converged) < len(self.order.target.members):
                return
        if self.verdict is None:
            self.verdict, self.reason = wish, reason
            why = "" if reason is None else f": {reason}"
            sim.note(f"verdict of {self.order.handoff_id} revision {self.order.plan_revision}: {wish}{why}")
            waiting, self._waiting = self._waiting, []
            for each, its_number in waiting:
                sim.clock.after(0.0, self._ask, each, its_number)

    def _ask(self, rank: Rank, number: int) -> None:
        sim = self.simulation
        if not self._counts(rank, number):
            return
        if self.verdict is not None and self.store.reaches(rank):
            rank.streamed(self.verdict, self.reason)
        elif self.verdict is None and not sim.conditions.polls:
            self._waiting.append((rank, number))
        else:
            sim.clock.after(ASK_AGAIN_S * (0.2 + sim.draw()), self._ask, rank, number)

    def _counts(self, rank: Rank, number: int) -> bool:
        """Whether the rank still streams for this revision."""
        return rank.alive and number in rank.building and rank.stage is RankStage.STREAMING
