"""The cutover of one rank, from the agreed boundary to the decision; hosted in the rank's main thread.

Pure, sans-IO: `handle(event, now)` returns what to do next. Nobody applies the last step before the decision has been
read from the store; what the store says rules, never one's own wish. `now` is monotonic seconds of this rank.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from liver_core.handoff.messages import CutoverDeadlines, Decision, HandoffId, Reason


class Level(IntEnum):
    """What a target holds; the barrier of g+1 is the MIN over its ranks."""

    NOTHING = 0
    STATE = 1  # masters and moments, but not the gradients, because a source was lost: GO-REDO is possible
    EVERYTHING = 2  # and certified


class CutoverState(StrEnum):
    WAITING = "waiting"  # no boundary agreed yet; may still be withdrawn
    READING = "reading"
    HELD = "held"  # everything that could be read is here; the certificates are being compared
    VOTED = "voted"  # in the barrier, or waiting for the decision
    DECIDED = "decided"
    FELL = "fell"  # no decision could be read: the checkpoint rung
    RELEASED = "released"  # withdrawn before the boundary


# Events.


@dataclass(frozen=True, slots=True)
class BoundaryAgreed:
    """All ranks of the source world held the same ready tag. A newcomer is told so by the store."""

    version: int


@dataclass(frozen=True, slots=True)
class StateRead:
    """The reads are over. `level` STATE counts only with `source_lost`; a world loaded from a checkpoint has no source
    at all and says (STATE, source_lost=True): it starts at the version it holds and does the batch."""

    level: Level
    source_lost: bool = False
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class CertificateCompared:
    """Certificates of both sides were compared for everything this rank holds."""

    equal: bool
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class BarrierPassed:
    """The MIN over all ranks of the target world."""

    level: Level


@dataclass(frozen=True, slots=True)
class BarrierFailed:
    """The barrier timed out or a peer is gone."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class DecisionRead:
    """What the record in the store holds: the answer of a compare-and-set or of a read."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class StoreUnreachable:
    """The store did not answer."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The handoff was aborted before the boundary."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed (`next_deadline` says until when nothing can happen)."""


CutoverEvent = (
    BoundaryAgreed
    | StateRead
    | CertificateCompared
    | BarrierPassed
    | BarrierFailed
    | DecisionRead
    | StoreUnreachable
    | Withdrawn
    | Tick
)


# Effects.


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read masters, moments, gradients and small state of `version`; answer with StateRead before `until`."""

    version: int
    until: float


@dataclass(frozen=True, slots=True)
class CompareCertificates:
    """Answer with CertificateCompared."""


@dataclass(frozen=True, slots=True)
class EnterBarrier:
    """MIN all-reduce over the ranks of the target world; answer with BarrierPassed or BarrierFailed before `until`."""

    level: Level
    until: float


@dataclass(frozen=True, slots=True)
class ProposeDecision:
    """Compare-and-set `undecided -> wish` on `decision_key(handoff_id)`; answer with DecisionRead of what is there."""

    wish: Decision
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReadDecision:
    """Read the record at `not_before`; answer with DecisionRead or StoreUnreachable."""

    not_before: float


@dataclass(frozen=True, slots=True)
class ApplyStepInTarget:
    """GO: apply the step in the target world with the source's clip coefficient, gather weights, swap worlds."""


@dataclass(frozen=True, slots=True)
class RedoBatchInTarget:
    """GO-REDO: start the target world at the version held, drop the gradients, do the batch again."""


@dataclass(frozen=True, slots=True)
class ApplyStepInSource:
    """NO-GO and this rank is a member of the source world: apply the step there and train on."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Leave:
    """This rank has no part in the world that goes on: say so and exit."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class FallToCheckpoint:
    """The decision cannot be known: nothing may be applied; the job comes back from a checkpoint."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Release:
    """Withdrawn before the boundary: drop the target world; a source trains on, a newcomer exits."""

    reason: Reason


CutoverEffect = (
    ReadState
    | CompareCertificates
    | EnterBarrier
    | ProposeDecision
    | ReadDecision
    | ApplyStepInTarget
    | RedoBatchInTarget
    | ApplyStepInSource
    | Leave
    | FallToCheckpoint
    | Release
)


def decision_key(handoff_id: HandoffId) -> str:
    """The key of a handoff's decision record in the store of the target generation."""
    return f"handoff/{handoff_id}/decision"


class Cutover:
    """One rank's way through one cutover. `wait_until` bounds the wait for the boundary."""

    def __init__(
        self,
        *,
        rank: int,
        in_source: bool,
        in_target: bool,
        deadlines: CutoverDeadlines,
        wait_until: float,
    ) -> None:
        self.rank = rank
        self.in_source = in_source
        self.in_target = in_target
        self.deadlines = deadlines
        self.wait_until = wait_until
        self.state = CutoverState.WAITING

    @property
    def next_deadline(self) -> float:
        """When a Tick is due at the latest."""
        raise NotImplementedError

    def handle(self, event: CutoverEvent, now: float) -> tuple[CutoverEffect, ...]:
        """Take one event."""
        raise NotImplementedError
