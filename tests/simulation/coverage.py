"""Which (state, event) pairs were met, and which cannot be. Pure."""

from __future__ import annotations

from collections import Counter

from liver_core.handoff.cutover import CutoverEvent, CutoverState
from liver_core.handoff.messages import Phase, Promise
from liver_core.handoff.participant_events import (
    OrderReceived,
    ParticipantEvent,
    ParticipantState,
    RankReported,
    RankStage,
)
from liver_core.handoff.pending import PendingState
from liver_core.handoff.pending_events import PendingEvent
from liver_core.handoff.proposer import ProposerState
from liver_core.handoff.proposer_events import ProposerEvent

Pair = tuple[str, str, str]  # machine, state, event


class Coverage:
    """Counts pairs of one or many runs."""

    def __init__(self) -> None:
        self.pairs: Counter[Pair] = Counter()

    def participant(self, state: ParticipantState, promise: Promise | None, event: ParticipantEvent) -> None:
        """`state` and `promise` are those before the event."""
        name = event.__class__.__name__
        if isinstance(event, RankReported):
            name = f"Rank.{event.stage}" if _is_about(event, promise) else "Rank.other"
        elif isinstance(event, OrderReceived):
            name = f"Order.{event.order.phase}"
        self.pairs["participant", state, name] += 1

    def proposer(self, state: ProposerState, event: ProposerEvent) -> None:
        self.pairs["proposer", state, event.__class__.__name__] += 1

    def pending(self, state: PendingState, event: PendingEvent) -> None:
        self.pairs["pending", state, event.__class__.__name__] += 1

    def cutover(self, state: CutoverState, event: CutoverEvent) -> None:
        self.pairs["cutover", state, event.__class__.__name__] += 1


def _is_about(event: RankReported, promise: Promise | None) -> bool:
    """Whether the rank speaks of the promised revision of the promised handoff, or of no handoff at all."""
    if not event.handoff_id:
        return True
    if promise is None or event.handoff_id != promise.handoff_id:
        return False
    return event.plan_revision in (None, promise.plan_revision)


PARTICIPANT_EVENTS = (
    *(f"Order.{phase}" for phase in Phase),
    # Its host tells a participant nothing else of a rank.
    *(f"Rank.{stage}" for stage in RankStage if stage is RankStage.TRAINING or stage.is_of_handoff),
    "Rank.other",
    "StartReceived",
    "WorldReplaced",
    "RankDied",
    "Tick",
)
PROPOSER_EVENTS = ("Open", "Amend", "Cancel", "MemberLost", "ReportReceived", "Tick")
CUTOVER_EVENTS = (
    "StateRead",
    "CertificateCompared",
    "ComparisonFailed",
    "BarrierPassed",
    "BarrierFailed",
    "DecisionRead",
    "TargetBuilt",
    "StoreUnreachable",
    "Tick",
)


def every_pair() -> set[Pair]:
    """All that there could be."""
    pairs = {("participant", str(state), event) for state in ParticipantState for event in PARTICIPANT_EVENTS}
    pairs |= {("proposer", str(state), event) for state in ProposerState for event in PROPOSER_EVENTS}
    return pairs | {("cutover", str(state), event) for state in CutoverState for event in CUTOVER_EVENTS}
