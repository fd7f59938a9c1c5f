"""The worlds in which simulated ranks step: nobody passes a boundary that not all have reached. No tensors. Pure.

Each rank shows its word and learns the outcome at a moment of its own, so that commands come in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from liver_core.handoff import Agreement, BoundaryPhase, Order, Reason, agreed, boundary_pair
from liver_core.layout import Member, Roster
from tests.simulation.truth import CHECKPOINT_EVERY

if TYPE_CHECKING:
    from tests.simulation.ranks import SimRank
    from tests.simulation.simulation import Simulation

COLLECTIVE_TIMEOUT_S = 3.0
LEASE_AGAIN_S = 0.2
JOIN_TIMEOUT_S = 15.0
SHOW_S, SETTLE_S = 0.03, 0.02
"""How far ranks are apart at a boundary: when they show their words, and when they learn the outcome."""
LATE_S, LATE_SHARE = 1.5, 0.15
"""Now and then one comes late to the boundary, for example since it writes a checkpoint."""
CONNECT_S = 3.0
Then = Callable[["list[SimRank]", Agreement | None], None]


class SimWorld:
    """The ranks of one generation in lock step."""

    def __init__(self, simulation: Simulation, roster: Roster, era: int) -> None:
        self.simulation = simulation
        self.roster = roster
        self.generation = roster.generation
        self.era = era
        self.at_boundary: dict[Member, SimRank] = {}
        self.dead = self.is_due = False
        self.steps = 0
        self.begun = 0  # steps that all ranks began; those that were dropped too

    def join(self, rank: SimRank) -> None:
        """A rank goes on to the next step; the boundary comes when all have."""
        if self.dead:
            self.simulation.clock.after(COLLECTIVE_TIMEOUT_S, rank.break_down, self.lost_peer(rank))
            return
        if not self.at_boundary:
            self.simulation.clock.after(JOIN_TIMEOUT_S, self._give_up, self.steps)
        self.at_boundary[rank.member] = rank
        if len(self.at_boundary) == len(self.roster.members):
            self.simulation.note(f"generation {self.generation} trains at version {rank.version}")
            self._begin_step()

    def _begin_step(self) -> None:
        ranks = self._met()
        if ranks is None:
            return
        for rank in ranks:
            rank.maintain()
        self.is_due = True
        self.go_on()
        if self.is_due:
            self.simulation.clock.after(CONNECT_S + 0.1, self.go_on)  # One that dies while it connects says nothing.

    def go_on(self) -> None:
        """The step that is due begins once no rank makes communicators."""
        ranks = self._met() if self.is_due else None
        if ranks is None or any(rank.connects for rank in ranks):
            return
        self.is_due = False
        self.begun += 1
        self._do_part(1, self.begun)

    def _do_part(self, part: int, step: int) -> None:
        parts = self.simulation.plan.parts
        following = self.boundary if part == parts else self._between_parts
        arguments = () if part == parts else (part, step)
        self.simulation.clock.after(self.simulation.step_s / parts, following, *arguments)

    def _between_parts(self, part: int, step: int) -> None:
        """No gradient is whole: only a step that all want to drop ends here."""
        assert step == self.begun
        ranks = self._met()
        if ranks is None:
            return
        for rank in ranks:
            rank.maintain()
        left = (self.simulation.plan.parts - part) * self.simulation.step_s / self.simulation.plan.parts

        def then(ranks: list[SimRank], agreement: Agreement | None) -> None:
            if agreement is None:
                self._do_part(part + 1, step)
            else:
                assert agreement.phase is BoundaryPhase.DROP
                self._handed_over(ranks, f"step of generation {self.generation} dropped")

        self._agree(ranks, lambda rank: rank.word_between_parts(left), then, dropped=True)

    def boundary(self) -> None:
        """After the gradients are reduced, before the step."""
        ranks = self._met()
        if ranks is not None:
            self._agree(ranks, lambda rank: rank.word(), self._boundary_is_over, dropped=False)

    def _boundary_is_over(self, ranks: list[SimRank], agreement: Agreement | None) -> None:
        self.steps += 1
        if agreement is not None and agreement.phase is BoundaryPhase.READY:
            self._handed_over(ranks, f"boundary of generation {self.generation} agreed")
        else:
            self._apply(ranks)

    # The all-reduce of the words.

    def _agree(self, ranks: list[SimRank], show: Callable[[SimRank], int], then: Then, *, dropped: bool) -> None:
        sim, words = self.simulation, dict[Member, int]()
        for rank in ranks:
            late_s = LATE_S * sim.random.random() if sim.chance(LATE_SHARE) else 0.0
            sim.clock.after(late_s + SHOW_S * sim.random.random(), self._show, rank, words, show, then, dropped)

    def _show(
        self,
        rank: SimRank,
        words: dict[Member, int],
        show: Callable[[SimRank], int],
        then: Then,
        dropped: bool,
    ) -> None:
        if self.dead or not rank.alive or rank.world is not self:
            self.collapse()
            return
        words[rank.member] = show(rank)
        if len(words) < len(self.roster.members):
            return
        ranks = self._met()
        if ranks is None:
            return
        sim, found, left = self.simulation, self._agreed(list(words.values())), list(ranks)
        if _cuts_over(found):
            self.at_boundary = {}  # Whoever comes back to this world joins it again.
        for each in ranks:
            sim.clock.after(SETTLE_S * sim.random.random(), self._settle, each, found, left, ranks, then, dropped)

    def _settle(
        self,
        rank: SimRank,
        agreement: Agreement | None,
        left: list[SimRank],
        ranks: list[SimRank],
        then: Then,
        dropped: bool,
    ) -> None:
        """This rank knows the outcome; what goes on in the same world goes on when all know it."""
        left.remove(rank)
        if rank.alive:
            rank.boundary_over(agreement, dropped=dropped)
            if _cuts_over(agreement) and rank.alive and not rank.is_past_boundary:
                self.simulation.truth.stays(rank)
        if left or (not _cuts_over(agreement) and self._met() is None):
            return
        then(ranks, agreement)

    def _agreed(self, words: list[int]) -> Agreement | None:
        pairs = [boundary_pair(word) for word in words]
        return agreed(min(pair[0] for pair in pairs), -min(pair[1] for pair in pairs))

    def _handed_over(self, ranks: list[SimRank], what: str) -> None:
        self.simulation.note(f"{what} at version {ranks[0].cutover_version}")

    # Steps.

    def _apply(self, ranks: list[SimRank]) -> None:
        """The step, as soon as any rank holds a step lease."""
        if not any(rank.has_lease for rank in ranks):
            self.simulation.clock.after(LEASE_AGAIN_S, self._apply_later)
            return
        for rank in ranks:
            rank.apply_step(self)
        if self.steps % CHECKPOINT_EVERY == 0:
            self.simulation.checkpoints.begin(self, ranks)
        self._begin_step()

    def _apply_later(self) -> None:
        ranks = self._met()
        if ranks is not None:
            self._apply(ranks)

    def _met(self) -> list[SimRank] | None:
        """All ranks, in a collective of all; None where one is gone."""
        ranks = [self.at_boundary.get(member) for member in self.roster.members]
        met = [rank for rank in ranks if rank is not None and rank.alive and rank.world is self]
        if self.dead or len(met) < len(ranks):
            self.collapse()
            return None
        return met

    def collapse(self) -> None:
        """A peer is gone: the collective fails on whoever is in it."""
        self.dead = True
        for rank in self.at_boundary.values():
            self.simulation.clock.after(COLLECTIVE_TIMEOUT_S, rank.break_down, self.lost_peer(rank))

    def lost_peer(self, rank: SimRank) -> Reason:
        return Reason(f"a collective of generation {self.generation} failed", "train", self.roster.rank_of(rank.member))

    def _give_up(self, steps: int) -> None:
        if not self.dead and self.steps == steps and 0 < len(self.at_boundary) < len(self.roster.members):
            self.collapse()


def _cuts_over(agreement: Agreement | None) -> bool:
    return agreement is not None and agreement.phase in (BoundaryPhase.READY, BoundaryPhase.DROP)


class Connecting:
    """Where the ranks of one next world make their communicators: all of them, or each sees it fail in time."""

    def __init__(self, simulation: Simulation, order: Order) -> None:
        self.simulation = simulation
        self.members = set(order.target.members)
        self.ranks: dict[Member, tuple[SimRank, int]] = {}

    def enter(self, rank: SimRank, build: int) -> None:
        """`rank` makes those of its build. A leaver makes none."""
        clock = self.simulation.clock
        if rank.member not in self.members:
            clock.after(0.01, rank.connected, build, None)
            return
        self.ranks[rank.member] = rank, build
        clock.after(CONNECT_S, rank.connected, build, Reason("not all ranks came", "connect", rank.cutover_rank))
        if self.ranks.keys() >= self.members and all(each.alive for each, _ in self.ranks.values()):
            for each, number in self.ranks.values():
                clock.after(0.05 + 0.1 * self.simulation.random.random(), each.connected, number, None)
