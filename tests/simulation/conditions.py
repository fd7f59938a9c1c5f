"""How long things take in a seed's run, and the faults that are armed in it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.plans import Plan

if TYPE_CHECKING:
    from liver_core.layout import Member
    from service.simulation.world.parts import RankInPause
    from service.simulation.world.virtual_time import VirtualTime

CHECKPOINT_EVERY = 5
DETECT_S, GATHER_S, UNHURRIED_S = 3.0, 12.0, 60.0
STALLS_S = 90.0
"""Longer than any notice."""
SHARE_OF_NOTICE = 0.9
"""What may be used of a notice."""
DIES = {"rank to be ended": 0.1, "handoff opened": 0.04, "end kept": 0.04}
"""How often an agent dies between two things that belong together."""


class SeededConditions:
    """`random`: of the seed. `armed`: faults that strike when a host next asks; none do once `chaos` is over. `clock`,
    and `strikes`, which hears of a fault on a node, are set by whoever hosts it."""

    clock: VirtualTime
    strikes: Callable[[str], None]

    def __init__(self, seed: int, random: Random, plan: Plan) -> None:
        self.seed, self.random, self.plan = seed, random, plan
        self.step_s, self.parts, self.connects = plan.step_s, plan.parts, plan.connects
        self.checkpoint_every = CHECKPOINT_EVERY
        self.settle_s = plan.settle_s
        self.polls, self.detect_s, self.gather_s, self.unhurried_s = True, DETECT_S, GATHER_S, UNHURRIED_S
        self.armed: list[tuple[str, Member]] = []
        self.chaos = True
        self._sources = {"everything else": random}
        self._deaths = self.draws("deaths")

    def draws(self, of: str) -> Random:
        """A source of numbers for one thing."""
        if of not in self._sources:
            self._sources[of] = Random(f"{of} of {self.seed}")
        return self._sources[of]

    def build_s(self, member: Member) -> float:
        """Seconds until the target world is built on a rank; a stalled one never is."""
        if self.takes_fault("build stalls", member):
            return STALLS_S
        return self.plan.slow_s + 0.3 + 2.5 * self.random.random()

    def start_s(self, member: Member) -> float:
        """As long as a build."""
        return self.build_s(member)

    def connect_s(self, member: Member) -> float:
        """Seconds until a rank has made its endpoint, or is connected to those of others; a stalled one never is."""
        if self.random.random() < 0.5 and self.takes_fault("build stalls", member):
            return STALLS_S
        return 0.1 + 0.4 * self.random.random()

    def stream_s(self, member: Member) -> float:
        """Seconds until what streams to a rank has converged; a stalled stream never does."""
        if self.takes_fault("stream stalls", member):
            return STALLS_S
        return 0.2 + 2.0 * self.random.random()

    def read_s(self, rank: RankInPause, until: float) -> float:
        """Seconds that a read takes; a slow one ends a little before or after its deadline."""
        if self.takes_fault("slow read", rank.member):
            return max(0.1, until - self.clock.now + 0.6 * self.random.random() - 0.2)
        return 0.1 + 0.8 * self.random.random()

    def switch_s(self, rank: RankInPause) -> float:
        """At once."""
        return 0.0

    def safe_by(self, heard_s: float, ends_s: float) -> float:
        """Some of a notice is kept for delays."""
        return heard_s + SHARE_OF_NOTICE * (ends_s - heard_s)

    def dies_for_s(self, where: str) -> float | None:
        """How long an agent is down that dies there; None where it lives."""
        if self.chaos and not self.plan.scripted and self.plan.faults and self._deaths.random() < DIES[where]:
            return 0.2 + 3.0 * self._deaths.random()
        return None

    def chance(self, probability: float) -> bool:
        """Something small that goes another way now and then, but not in a run that a script disturbs by itself."""
        return self.chaos and not self.plan.scripted and self.random.random() < probability

    def skew_s(self) -> float:
        """How far a host's clock is ahead: at most three seconds, so that two differ by up to as much."""
        return 0.0 if self.plan.scripted else 3.0 * self.random.random()

    def takes_fault(self, kind: str, member: Member) -> bool:
        """Whether a fault of this kind was armed for the member; it strikes once. A store fails on whichever node has
        the next one."""
        armed = next(
            (each for each in self.armed if each[0] == kind and (kind == "store fails" or each[1] == member)), None
        )
        if armed is None:
            return False
        self.armed.remove(armed)
        self.strikes(member.node_id)
        return True
