"""Which cause a slot's time has. Pure."""

from dataclasses import dataclass

from liver_core.handoff import RankStage
from service.ledger.tables import Cause

ENDED = (RankStage.LEFT, RankStage.ABORTED, RankStage.FINISHED)
LOST = (RankStage.BROKEN, RankStage.FAILED)
OVER = (*ENDED, *LOST)
"""The rank does no step any more."""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """What a report contains about one slot. `stage` is None if no rank runs on it. `repeats_until`: the step that the
    job had reached before its generation began; that other ranks are a step further repeats nothing."""

    stage: RankStage | None
    generation: int | None
    active_generation: int | None
    from_checkpoint: bool = False
    step: int = 0
    repeats_until: int = 0


def cause_of(slot: SlotFacts) -> Cause:
    """The cause of the time since the previous report.

    A rank that prepares a handoff still trains, so its time is productive; the handoff's measured pause is accounted
    separately. A rank of a generation that is not active yet is a newcomer that starts.
    """
    if slot.stage is None or slot.stage in ENDED:
        return Cause.IDLE
    if slot.stage in LOST:
        return Cause.LOST
    if slot.stage is RankStage.STARTING:
        return Cause.FALLBACK_RESTART if slot.from_checkpoint else Cause.BOOTSTRAP
    if slot.generation != slot.active_generation:
        return Cause.BOOTSTRAP
    return Cause.RECOMPUTE if slot.step < slot.repeats_until else Cause.PRODUCTIVE
