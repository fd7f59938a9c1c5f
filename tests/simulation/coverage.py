"""Which (state, event) pairs were met, and which cannot be. Pure."""

from __future__ import annotations

from collections import Counter

from liver_core.handoff.cutover import CutoverEvent, CutoverState
from liver_core.handoff.messages import Promise
from liver_core.handoff.participant_events import ParticipantEvent, ParticipantState
from liver_core.handoff.participant_table import EVENTS, TABLE, event_name
from liver_core.handoff.pending import PendingState
from liver_core.handoff.pending_events import PendingEvent
from liver_core.handoff.proposer import ProposerState
from liver_core.handoff.proposer_events import ProposerEvent
from service.simulation.world.observer import Violation

Pair = tuple[str, str, str]  # machine, state, event


class Coverage:
    """Counts pairs of one or many runs."""

    def __init__(self) -> None:
        self.pairs: Counter[Pair] = Counter()

    def participant(
        self, state: ParticipantState, promise: Promise | None, event: ParticipantEvent, following: ParticipantState
    ) -> None:
        """`state` and `promise` are those before the event. The table names the state that is `following`."""
        name = event_name(event, promise)
        self.pairs["participant", state, name] += 1
        if following not in TABLE[state, name]:
            raise Violation(f"table: {name} brought a participant from {state} to {following}")

    def proposer(self, state: ProposerState, event: ProposerEvent) -> None:
        self.pairs["proposer", state, event.__class__.__name__] += 1

    def pending(self, state: PendingState, event: PendingEvent) -> None:
        self.pairs["pending", state, event.__class__.__name__] += 1

    def cutover(self, state: CutoverState, event: CutoverEvent) -> None:
        self.pairs["cutover", state, event.__class__.__name__] += 1


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
    pairs = {("participant", str(state), event) for state in ParticipantState for event in EVENTS}
    pairs |= {("proposer", str(state), event) for state in ProposerState for event in PROPOSER_EVENTS}
    return pairs | {("cutover", str(state), event) for state in CutoverState for event in CUTOVER_EVENTS}
