"""How long things take in a simulated world, and what goes wrong in it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from service.simulation.world.parts import RankInPause

if TYPE_CHECKING:
    from liver_core.layout import Member


class Draws(Protocol):
    """Where numbers are drawn from."""

    def random(self) -> float:
        """At least 0, below 1."""
        ...


class Conditions(Protocol):
    """`step_s`: of a step, which has `parts` after which it can be dropped. `connects`: the ranks of a next world make
    communicators of GPUs at a boundary. `checkpoint_every`: steps from one checkpoint to the next, 0: none is written.
    `polls`: agents look, and worlds step, one event after the other, also while nothing goes on; else they sleep until
    something stirs them, and steps are counted by time. `detect_s`: a collective fails so long after a peer was lost.
    `settle_s`: ranks learn the outcome of a boundary within that. `gather_s`: the first rank of a start waits for the
    others. `unhurried_s`: of a handoff where nothing presses.
    Seconds all."""

    step_s: float
    parts: int
    connects: bool
    checkpoint_every: int
    polls: bool
    detect_s: float
    settle_s: float
    gather_s: float
    unhurried_s: float

    def draws(self, of: str) -> Draws:
        """A source of numbers for one thing, so that more of another do not change it."""
        ...

    def chance(self, probability: float) -> bool:
        """Whether something small goes another way this time."""
        ...

    def takes_fault(self, kind: str, member: Member) -> bool:
        """Whether a fault of this kind strikes the member now; it strikes once."""
        ...

    def dies_for_s(self, where: str) -> float | None:
        """How long an agent is down that dies there, between two things that it does; None where it lives."""
        ...

    def safe_by(self, heard_s: float, ends_s: float) -> float:
        """By when the state of a node must be elsewhere: its notice was heard then, and says that it ends then."""
        ...

    def skew_s(self) -> float:
        """How far the clock of one more node is ahead."""
        ...

    def build_s(self, member: Member) -> float:
        """Until the target world is built on a rank."""
        ...

    def start_s(self, member: Member) -> float:
        """Until a rank of a start can meet the others."""
        ...

    def connect_s(self, member: Member) -> float:
        """Until a rank has made its endpoint, or is connected to those of others."""
        ...

    def stream_s(self, member: Member) -> float:
        """Until what streams to a rank has converged."""
        ...

    def read_s(self, rank: RankInPause, until: float) -> float:
        """What a read takes that must end then."""
        ...

    def switch_s(self, rank: RankInPause) -> float:
        """From GO to the first step in the next world."""
        ...
