"""How long starts of a job take, and what follows from that: whether one whose node will go is worth carrying through,
and when the next one begins after several that made no step. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from statistics import median

from liver_core.retries import doubled_s

AGAIN_FIRST_S, AGAIN_MOST_S = 10.0, 120.0
"""Between the beginnings of two starts. One that lasted longer is followed at once."""
STARTS_LOOKED_AT = 16


@dataclass(frozen=True, slots=True)
class Starts:
    """`usual_s`: from the beginning of a start to its first step, the median of those like the newest that made one;
    None: none has. `stepless`: so many of the newest in a row made none so far, that one included."""

    usual_s: float | None = None
    stepless: int = 0


def starts_of(found: Iterable[tuple[str, datetime, datetime | None]]) -> Starts:
    """From what each began with, when, and when it made its first step, the newest first. One that loads a checkpoint
    takes longer than one that does not."""
    newest = tuple(found)
    alike = [(begun_at, stepped_at) for kind, begun_at, stepped_at in newest if kind == newest[0][0]]
    took = [(stepped_at - begun_at).total_seconds() for begun_at, stepped_at in alike if stepped_at is not None]
    stepless = sum(1 for _ in takewhile(lambda each: each[2] is None, newest))
    return Starts(median(took) if took else None, stepless)


def next_start_at(starts: Starts, since: datetime, *, starts_max: int) -> datetime:
    """Before that no start begins, where the last one began at `since`. The first `starts_max` in a row follow each
    other at once. Then it takes ever longer: whatever takes their nodes, or is done to them by the job, goes on."""
    if starts.stepless < starts_max:
        return since
    return since + timedelta(seconds=doubled_s(AGAIN_FIRST_S, starts.stepless - starts_max, AGAIN_MOST_S))


@dataclass(frozen=True, slots=True)
class StartLeft:
    """What a start still has before it, in seconds. `to_step_s`: until its first step. `step_s`: of a usual step, at
    whose end its world can be handed over; 0 if not known. `to_end_s`: until the first of its nodes goes."""

    to_step_s: float
    step_s: float
    to_end_s: float

    @property
    def is_lost(self) -> bool:
        """Whether a node goes before the world could be handed over."""
        return self.to_end_s <= self.to_step_s + self.step_s

    @property
    def is_lost_in_s(self) -> float:
        """When that becomes so, should the first step be late."""
        return max(0.0, self.to_end_s - self.step_s)


def start_left(
    now: datetime,
    begun_at: datetime,
    end_at: datetime,
    *,
    usual_s: float,
    step_s: float,
    steps_from_at: datetime | None = None,
) -> StartLeft:
    """Of a start that takes `usual_s`, but makes no step before `steps_from_at`, and loses a node at `end_at`. Of one
    that already takes longer than usual nobody knows how much longer: 0."""
    usual_at = begun_at + timedelta(seconds=usual_s)
    to_step_s = max(0.0, (max(usual_at, steps_from_at or usual_at) - now).total_seconds())
    return StartLeft(to_step_s, step_s, (end_at - now).total_seconds())
