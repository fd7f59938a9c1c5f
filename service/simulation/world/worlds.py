"""The worlds in which simulated ranks step: nobody passes a boundary that not all have reached. No tensors. Pure.

Each rank shows its word and learns the outcome at a moment of its own, so that commands come in between.
"""

from __future__ import annotations

from collections.abc import Callable

from liver_core.handoff import Agreement, BoundaryPhase, FailedPart, FailureCause, Reason, agreed, boundary_pair
from liver_core.layout import Member, Roster
from service.simulation.world.connecting import CONNECT_S
from service.simulation.world.parts import Rank
from service.simulation.world.whole import Whole

LEASE_AGAIN_S = 0.2
JOIN_TIMEOUT_S = 15.0
SHOW_S = 0.03
"""How far ranks are apart when they show their words at a boundary."""
LATE_S, LATE_SHARE = 1.5, 0.15
"""Now and then one comes late to the boundary, for example since it writes a checkpoint."""
ALMOST = 1 - 1e-9
Then = Callable[["list[Rank]", Agreement | None], None]


class SimWorld:
    """The ranks of one generation in lock step."""

    def __init__(self, simulation: Whole, roster: Roster, *, is_begun: bool) -> None:
        self.simulation = simulation
        self.roster = roster
        self.generation = roster.generation
        self.is_begun = is_begun  # False: a start that has made no step yet
        self.at_boundary: dict[Member, Rank] = {}
        self.dead = self.is_due = False
        self.steps = 0
        self.begun = 0  # steps that all ranks began; those that were dropped too
        self._coasts_since: float | None = None  # the begin of a step, where the next ones are counted by time
        self._is_stirred = True  # the next boundary may matter
        self._into_s = 0.0  # of the part that begins next, what has passed of its step already

    def join(self, rank: Rank) -> None:
        """A rank goes on to the next step; the boundary comes when all have."""
        if not self.dead and not self._polls and any(map(self.simulation.is_gone, self.roster.members)):
            self._dies()
        if self.dead:
            self.simulation.clock.after(self._detect_s, rank.break_down, self.lost_peer(rank))
            return
        if not self.at_boundary:
            self.simulation.clock.after(JOIN_TIMEOUT_S, self._give_up, self.steps)
        self.at_boundary[rank.member] = rank
        if len(self.at_boundary) == len(self.roster.members):
            self.simulation.note(f"generation {self.generation} trains at version {rank.version}")
            if self.is_begun:
                self.simulation.observer.world_begins(self)
            self._begin_step()

    @property
    def _polls(self) -> bool:
        return self.simulation.conditions.polls

    @property
    def _detect_s(self) -> float:
        return self.simulation.conditions.detect_s

    def _begin_step(self) -> None:
        ranks = self._met()
        if ranks is None:
            return
        for rank in ranks:
            rank.maintain()
        if not (self._polls or self._is_stirred or any(rank.redoing for rank in ranks)):
            self._coasts_since = self.simulation.clock.now
            return
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

    def look(self) -> None:
        """Something has changed for one of its ranks, so that the next boundary may matter."""
        self._is_stirred = True
        ranks = None if self._coasts_since is None else self._wake()
        if ranks is not None:
            self._do_part(int(self._into_s / self.simulation.part_s(self)) + 1 if self._into_s else 1, self.begun)

    def _wake(self) -> list[Rank] | None:
        """Count the steps that were made meanwhile; the next one is under way."""
        sim, since = self.simulation, self._coasts_since
        assert since is not None
        step_s, self._coasts_since = sim.step_s(self), None
        made = int((sim.clock.now - since) / step_s) if step_s else 0
        self._into_s = max(0.0, sim.clock.now - since - made * step_s) if step_s else 0.0
        self.steps += made
        self.begun += made + 1
        for rank in self.at_boundary.values():
            if rank.alive:
                rank.made_steps(made)
        return self._met()

    def _do_part(self, part: int, step: int) -> None:
        """The next one of the step, or the one that is under way."""
        sim = self.simulation
        step_s, part_s = sim.step_s(self), sim.part_s(self)
        is_last = part * part_s >= ALMOST * step_s
        takes_s = part_s if not is_last else step_s - (part - 1) * part_s
        into_s, self._into_s = max(0.0, self._into_s - (part - 1) * part_s), 0.0
        if is_last:
            sim.clock.after(takes_s - into_s, self.boundary)
        else:
            sim.clock.after(takes_s - into_s, self._between_parts, part, step)

    def _between_parts(self, part: int, step: int) -> None:
        """No gradient is whole: only a step that all want to drop ends here."""
        assert step == self.begun
        ranks = self._met()
        if ranks is None:
            return
        for rank in ranks:
            rank.maintain()
        left = self.simulation.step_s(self) - part * self.simulation.part_s(self)

        def then(ranks: list[Rank], agreement: Agreement | None) -> None:
            if agreement is None:
                self._do_part(part + 1, step)
            else:
                assert agreement.phase is BoundaryPhase.DROP
                self._handed_over(ranks, f"step of generation {self.generation} dropped")

        self._agree(ranks, lambda rank: rank.word_between_parts(left), then, dropped=True)

    def boundary(self) -> None:
        """After the gradients are reduced, before the step."""
        ranks = self._met()
        self._is_stirred = False
        if ranks is not None:
            self._agree(ranks, lambda rank: rank.word(), self._boundary_is_over, dropped=False)

    def _boundary_is_over(self, ranks: list[Rank], agreement: Agreement | None) -> None:
        self.steps += 1
        if agreement is not None and agreement.phase is BoundaryPhase.READY:
            self._handed_over(ranks, f"boundary of generation {self.generation} agreed")
        else:
            self._apply(ranks)

    # The all-reduce of the words.

    def _agree(self, ranks: list[Rank], show: Callable[[Rank], int], then: Then, *, dropped: bool) -> None:
        sim, words = self.simulation, dict[Member, int]()
        for rank in ranks:
            late_s = LATE_S * sim.draw() if sim.conditions.chance(LATE_SHARE) else 0.0
            sim.clock.after(late_s + SHOW_S * sim.draw(), self._show, rank, words, show, then, dropped)

    def _show(
        self,
        rank: Rank,
        words: dict[Member, int],
        show: Callable[[Rank], int],
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
            sim.clock.after(sim.conditions.settle_s * sim.draw(), self._settle, each, found, left, ranks, then, dropped)

    def _settle(
        self,
        rank: Rank,
        agreement: Agreement | None,
        left: list[Rank],
        ranks: list[Rank],
        then: Then,
        dropped: bool,
    ) -> None:
        """This rank knows the outcome; what goes on in the same world goes on when all know it."""
        left.remove(rank)
        if rank.alive:
            rank.boundary_over(agreement, dropped=dropped)
            if _cuts_over(agreement) and rank.alive and not rank.is_past_boundary:
                self.simulation.observer.stays(rank)
        if left or (not _cuts_over(agreement) and self._met() is None):
            return
        then(ranks, agreement)

    def _agreed(self, words: list[int]) -> Agreement | None:
        pairs = [boundary_pair(word) for word in words]
        return agreed(min(pair[0] for pair in pairs), -min(pair[1] for pair in pairs))

    def _handed_over(self, ranks: list[Rank], what: str) -> None:
        self.simulation.note(f"{what} at version {ranks[0].cutover_version}")

    # Steps.

    def _apply(self, ranks: list[Rank]) -> None:
        """The step, as soon as any rank holds a step lease."""
        if not any(rank.has_lease for rank in ranks):
            self.simulation.clock.after(LEASE_AGAIN_S, self._apply_later)
            return
        is_first = not self.is_begun
        for rank in ranks:
            rank.apply_step(self)
        if is_first:
            self.simulation.observer.world_begins(self)
            for rank in ranks:
                self.simulation.agents[rank.member].link.tell_news()
        if all(rank.ends_after_step for rank in ranks):
            self._end(ranks)
            return
        every = self.simulation.conditions.checkpoint_every
        if every and self.steps % every == 0:
            self.simulation.checkpoints.begin(self, ranks)
        self._begin_step()

    def _end(self, ranks: list[Rank]) -> None:
        """All of them were told to end: with a checkpoint, where the job writes any."""
        self.dead, self.at_boundary = True, {}
        self.simulation.observer.world_ends(self)
        if self.simulation.conditions.checkpoint_every:
            self.simulation.checkpoints.publish_now(self, ranks[0].version)
        for rank in ranks:
            rank.exit(Reason("it was told to end", "supervise", self.roster.rank_of(rank.member)))

    def _apply_later(self) -> None:
        ranks = self._met()
        if ranks is not None:
            self._apply(ranks)

    def _met(self) -> list[Rank] | None:
        """All ranks, in a collective of all; None where one is gone."""
        ranks = [self.at_boundary.get(member) for member in self.roster.members]
        met = [rank for rank in ranks if rank is not None and rank.alive and rank.world is self]
        if self.dead or len(met) < len(ranks):
            self.collapse()
            return None
        return met

    def collapse(self) -> None:
        """A peer is gone: the collective fails on whoever is in it."""
        self._dies()
        for rank in self.at_boundary.values():
            self.simulation.clock.after(self._detect_s, rank.break_down, self.lost_peer(rank))

    def misses_rank(self) -> None:
        """The process of one has ended. A world that takes steps one by one finds that at its next boundary."""
        if self._polls or self.dead:
            return
        if self._coasts_since is not None:
            self._wake()
        if not self.dead:
            self.collapse()

    def _dies(self) -> None:
        if not self.dead:
            self.dead = True
            self.simulation.observer.world_lost(self)

    def lost_peer(self, rank: Rank) -> Reason:
        text, number = f"a collective of generation {self.generation} failed", self.roster.rank_of(rank.member)
        return Reason(text, "train", number, cause=FailureCause(FailedPart.PEER))

    def hear_of_death(self, rank: Rank, dead: Member) -> None:
        """`rank` is told that another one is dead: if it is in a collective, that fails now."""
        if dead in self.roster.members and self.at_boundary.get(rank.member) is rank:
            self._dies()
            rank.break_down(self.lost_peer(rank))

    def _give_up(self, steps: int) -> None:
        if self.steps == steps and 0 < len(self.at_boundary) < len(self.roster.members):
            self.collapse()  # Where another rank has felt it before, this one feels it now.


def _cuts_over(agreement: Agreement | None) -> bool:
    return agreement is not None and agreement.phase in (BoundaryPhase.READY, BoundaryPhase.DROP)
