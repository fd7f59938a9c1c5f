"""Which cause a slot's time has: by the stage that its rank reports, and by the steps that it reports. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, pairwise
from operator import attrgetter

from liver_core.handoff import RankStage
from service.ledger.tables import Cause

ENDED = (RankStage.LEFT, RankStage.ABORTED, RankStage.FINISHED)
LOST = (RankStage.BROKEN, RankStage.FAILED)
OVER = (*ENDED, *LOST)
"""The rank does no step any more."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a time was spent on."""

    cause: Cause
    job_id: str | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A time of which it is known what it was spent on."""

    starts_at: datetime
    ends_at: datetime
    spent: Spent


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step that the ranks of a node have made."""

    generation: int
    step: int
    seconds: float
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class Origin:
    """How a generation began. `begun_at`: the step of the checkpoint that it was started from, 0 without one.
    `repeats_until`: as in `SlotFacts`. `known`: its number, where the service has a row of it."""

    is_handoff: bool = True
    from_checkpoint: bool = False
    begun_at: int = 0
    repeats_until: int = 0
    known: int | None = None


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """What a report contains about one slot. `stage` is None if no rank runs on it. `has_stepped`: its world has made a
    step, or goes on where a handoff left off. `repeats_until`: the step that the job had reached before its generation
    began; that other ranks are a step further repeats nothing. `is_stalled`: no rank of its world makes a step."""

    stage: RankStage | None
    generation: int | None
    active_generation: int | None
    from_checkpoint: bool = False
    has_stepped: bool = True
    step: int = 0
    repeats_until: int = 0
    is_stalled: bool = False


def cause_of(slot: SlotFacts) -> Cause:
    """The cause of the time since the previous report.

    A rank that prepares a handoff still trains, so its time is productive; the handoff's measured pause is accounted
    separately. A rank of a generation that is not active yet is a newcomer that starts. A started world may train, and
    has nothing to show for it before its first step ends: what that took is counted once it is reported.
    """
    if slot.stage is None or slot.stage in ENDED:
        return Cause.IDLE
    if slot.stage in LOST:
        return Cause.LOST
    if slot.stage is RankStage.STARTING or (not slot.has_stepped and slot.generation == slot.active_generation):
        return Cause.FALLBACK_RESTART if slot.from_checkpoint else Cause.BOOTSTRAP
    if slot.generation != slot.active_generation:
        return Cause.BOOTSTRAP
    if slot.is_stalled:
        return Cause.STALLED
    return Cause.RECOMPUTE if slot.step < slot.repeats_until else Cause.PRODUCTIVE


def is_work(cause: Cause) -> bool:
    """Whether the rank was making steps."""
    return cause in (Cause.PRODUCTIVE, Cause.RECOMPUTE)


def parts_of(job_id: str, steps: Sequence[StepTime], origin_of: Callable[[int], Origin]) -> list[Part]:
    """What the ranks of one node did for a job from their first to their last step, without gaps.

    A world works from the begin of its first step to the end of its last one. One that took over by a handoff goes on
    where the one before it ended; before the first step of any other, its ranks started.
    """
    found: list[Part] = []
    for generation, group in groupby(sorted(steps, key=attrgetter("generation", "step")), attrgetter("generation")):
        rows, origin = list(group), origin_of(generation)
        starts_at = rows[0].finished_at - timedelta(seconds=rows[0].seconds)
        if found:
            last_at = found[-1].ends_at
            starts_at = last_at if origin.is_handoff else max(starts_at, last_at)
            found.append(Part(last_at, starts_at, start_of(job_id, origin)))
        for is_repeat, same in groupby(rows, lambda row, origin=origin: row.step <= origin.repeats_until):
            ends_at = max(starts_at, *(row.finished_at for row in same))
            cause = Cause.RECOMPUTE if is_repeat else Cause.PRODUCTIVE
            found.append(Part(starts_at, ends_at, Spent(cause, job_id, origin.known)))
            starts_at = ends_at
    return [part for part in found if part.ends_at > part.starts_at]


def start_of(job_id: str, origin: Origin) -> Spent:
    """What the time before the first step of a world was spent on."""
    return Spent(Cause.FALLBACK_RESTART if origin.from_checkpoint else Cause.BOOTSTRAP, job_id, origin.known)


def clipped(parts: Sequence[Part], *, after: datetime, until: datetime) -> list[Part]:
    """What of the parts lies between these times."""
    cut = (Part(max(part.starts_at, after), min(part.ends_at, until), part.spent) for part in parts)
    return [part for part in cut if part.ends_at > part.starts_at]


def painted(span: Part, over: Sequence[Part]) -> list[Part]:
    """`span` with what is known of parts of it painted over it. `over` is in order of time and does not overlap."""
    found, at = [], span.starts_at
    for part in clipped(over, after=span.starts_at, until=span.ends_at):
        found += [Part(at, part.starts_at, span.spent), part]
        at = part.ends_at
    found.append(Part(at, span.ends_at, span.spent))
    return _joined([part for part in found if part.ends_at > part.starts_at])


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbours that were spent on the same are one."""
    found = [*parts[:1]]
    for before, part in pairwise(parts):
        if part.spent == before.spent:
            found[-1] = Part(found[-1].starts_at, part.ends_at, part.spent)
        else:
            found.append(part)
    return found
