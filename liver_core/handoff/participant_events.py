"""What goes into a `Participant` and what comes out of it: events, effects and the record that its agent journals.

Pure. Effects are executed in order; `Persist` is confirmed on disk before any effect after it is carried out.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from liver_core.handoff.messages import (
    OUT_OF_TIME,
    AnyGeneration,
    Decision,
    FailedPart,
    FailureCause,
    HandoffId,
    HandoffName,
    Order,
    Phase,
    Promise,
    RankStage,
    Reason,
    Report,
    Stage,
    Tick,
)
from liver_core.layout import Member, Roster
from liver_core.layout.limits import STRICT, Bound, Count, Name


class ParticipantState(StrEnum):
    """Where this member is; everything but `idle` and `replaced` belongs to the one promised handoff."""

    IDLE = "idle"
    RESTORING = "restoring"  # the agent restarted; the rank was asked where it stands
    REPLACED = "replaced"  # the service starts another world: the rank of the one that is given up is being ended
    PREPARING = "preparing"
    STREAMING = "streaming"  # built; the state has not converged yet
    READY = "ready"  # built, connected and certified where it streamed; no permission yet
    PERMITTED = "permitted"  # the ready tag is set, or about to be
    WITHDRAWING = "withdrawing"  # the rank was told to take its tag back; the boundary may have been first
    ABORTING = "aborting"  # the rank was told to drop it; the boundary may have been first
    CUTTING_OVER = "cutting_over"
    ACTIVE = "active"  # first step in the target world done; what the source world held is kept until retire


OF_ONE_REVISION = (
    RankStage.PREPARING,
    RankStage.STREAMING,
    RankStage.PREPARED,
    RankStage.READY,
    RankStage.ABORTED,
)
"""Stages that are true of one plan revision only."""

BEFORE_PERMISSION = (
    ParticipantState.PREPARING,
    ParticipantState.STREAMING,
    ParticipantState.READY,
)
BEFORE_BOUNDARY = (*BEFORE_PERMISSION, ParticipantState.PERMITTED, ParticipantState.WITHDRAWING)
MAY_OBEY_ABORT = (*BEFORE_BOUNDARY, ParticipantState.ABORTING)

MAY_SHOW_TAG = (ParticipantState.PERMITTED, ParticipantState.WITHDRAWING)

RETIRE_GRACE_S = 600.0
"""A proposer that never says retire must not make a rank hold two worlds for ever."""

# Events.


@dataclass(frozen=True, slots=True)
class OrderReceived:
    """An Order arrived."""

    order: Order


@dataclass(frozen=True, slots=True)
class WorldReplaced:
    """The service has started `generation`, the first of a start. Level-triggered: it comes again and again, and to
    members of older worlds that have no part in the new one too."""

    generation: int


@dataclass(frozen=True, slots=True)
class StartReceived:
    """The service has this member start a rank of a world that reads nothing from an older one. Level-triggered."""

    order: Order


@dataclass(frozen=True, slots=True)
class RankReported:
    """The rank process said where it stands (unasked, or as the answer to QueryRank). Level-triggered: the last one is
    the truth.

    `generation` counts with TRAINING only: the world that the rank steps in. `handoff_id` is empty when the rank holds
    nothing of any handoff. `plan_revision` None means: not said, taken for the current one. A `reason` with PREPARED or
    READY is why the rank could not stream on the live rung: the ranks have agreed to take the next rung instead.
    """

    handoff_id: HandoffId
    generation: int
    stage: RankStage
    decision: Decision = Decision.UNDECIDED
    reason: Reason | None = None
    plan_revision: int | None = None


ENDED_UNSEEN = FailureCause(FailedPart.PEER)
"""Of a rank that ended while nobody looked: it may have ended itself because of another one, so nobody is blamed."""


@dataclass(frozen=True, slots=True)
class RankDied:
    """The rank process of this participant is gone, or was never there when QueryRank asked for it."""

    reason: Reason


ParticipantEvent = OrderReceived | WorldReplaced | StartReceived | RankReported | RankDied | Tick


# Effects.

ENDED_MAX = 8


@dataclass(frozen=True, slots=True)
class EndedHandoff:
    """How a handoff ended here; kept so that a late order gets the true answer. `proposer_id`: who led it, None where
    an older agent has not written that down."""

    handoff_id: HandoffName
    generation: AnyGeneration
    plan_revision: Count
    stage: Stage
    decision: Decision
    reason: Reason | None
    proposer_id: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantRecord:
    """All that must survive a restart of the agent.

    `active` is the world that this member's rank steps in, None when it runs no rank. `promise` and the `order` behind
    it stand until the handoff has ended here; `decision` and `reason` belong to it. The phase of `order` is PERMIT once
    this revision had permission, also where the promise has gone on from there. At most ENDED_MAX `ended` are kept.
    `replaced`: why the rank is being ended for a start of the service, `start`: what it is to start after that, if any.
    """

    __pydantic_config__ = STRICT

    active: Roster | None = None
    highest_generation: AnyGeneration = 0
    promise: Promise | None = None
    order: Order | None = None
    decision: Decision = Decision.UNDECIDED
    reason: Reason | None = None
    ended: Annotated[tuple[EndedHandoff, ...], Bound(max_length=ENDED_MAX)] = ()
    replaced: Reason | None = None
    start: Order | None = None

    @property
    def had_permission(self) -> bool:
        """Whether what is promised had permission, so that the others may be past its boundary."""
        promise, order = self.promise, self.order
        return promise is not None and order is not None and Phase.PERMIT in (promise.phase, order.phase)

    def is_awaited(self, reason: Reason | None = None) -> bool:
        """Whether the others may be past the boundary and wait for the rank, a newcomer: it had permission, or it gives
        up by itself, for this reason, and only the word of its own permission may have been lost."""
        gives_up = self.promise is not None and reason is not None and reason.phase == OUT_OF_TIME
        return self.active is None and (self.had_permission or gives_up)

    def worlds_without(self, member: Member) -> tuple[tuple[Roster, tuple[str, ...]], ...]:
        """The worlds that lose a rank with this member: the one that it steps in, and the one that it prepares. Each
        with the nodes of its ranks, in order, and of those that may be reading from them past a boundary."""
        following = None if self.order is None else self.order.target
        readers = following.node_ids() if following is not None and self.had_permission else ()
        lost = (roster for roster in (self.active, following) if roster is not None and member in roster.members)
        return tuple((roster, tuple(sorted({*roster.node_ids(), *readers}))) for roster in lost)


@dataclass(frozen=True, slots=True)
class Persist:
    """Journal the record, wait until it is on disk, and only then go on to the next effect. `born`: the start that its
    active world comes from, where it is new."""

    record: ParticipantRecord
    born: Order | None = None


@dataclass(frozen=True, slots=True)
class PrepareRank:
    """Start the rank process if the member has none, and tell it to build the target world. Repeating is safe."""

    order: Order


@dataclass(frozen=True, slots=True)
class StartRank:
    """Start the rank of a world that the service starts. No process is left in its place. It needs no permission: the
    ranks of its world meet in their store, and go on together or not at all."""

    order: Order


@dataclass(frozen=True, slots=True)
class SetReadyTag:
    """Tell the rank to show `tag` with BoundaryPhase.READY from its next boundary on."""

    handoff_id: HandoffId
    plan_revision: int
    tag: int


@dataclass(frozen=True, slots=True)
class ClearReadyTag:
    """Tell the rank to take its tag back. It answers PREPARED, or CUTTING_OVER when the boundary was first."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class AbortRank:
    """Tell the rank to clear its tag and drop the target world. It answers ABORTED, or what it is when the boundary was
    first. A rank that has a part in the target world only answers ABORTED and exits."""

    handoff_id: HandoffId
    reason: Reason


@dataclass(frozen=True, slots=True)
class RetireRank:
    """Every rank of the target world has done its first step: the rank may free what the source world held."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class StopRank:
    """End the rank process: a leaver after the decision, or a rank of a world that is given up. `at_once`: what it does
    until then counts for nothing. Its end must be told (RankDied), also where there is no process."""

    reason: Reason
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class QueryRank:
    """Ask the rank where it stands. The answer comes as RankReported, or RankDied when there is no such process."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """Send the report to the proposer `to`; it may get lost."""

    to: str
    report: Report


ParticipantEffect = (
    Persist
    | PrepareRank
    | StartRank
    | SetReadyTag
    | ClearReadyTag
    | AbortRank
    | RetireRank
    | StopRank
    | QueryRank
    | SendReport
)
