"""How long a job's steps take now in each layout that it ran in, from steps made at different times. Pure.

A machine is not equally fast at all times: others share it, clocks change, a network is busy. Two layouts are
therefore compared by steps made next to each other, before and after the switch between them. What has changed since,
has changed for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WARM_UP_STEPS = 5
"""The first steps of a world are not like the others: it has just been entered."""
WINDOW_STEPS = 25
"""So many of a world's first and of its last steps after these are looked at."""
EDGE_STEPS = WARM_UP_STEPS + WINDOW_STEPS
STEPS_MIN = 3
"""A median of fewer says nothing."""
_MEDIAN_ERROR = 1.2533 * 1.4826
"""Standard error of a median of n values: this, times their median absolute deviation, over the root of n, where values
are spread normally."""


@dataclass(frozen=True, slots=True)
class WorldSteps:
    """The first and the last steps of one world in seconds, in the order they were made, up to the one before its
    handoff was opened: preparing that makes steps longer."""

    layout: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LayoutStep:
    """Seconds of a step in a layout as they would be now. `error`: by what share of itself the number may be off."""

    layout: str
    seconds: float
    error: float


def as_of_now(worlds: Sequence[WorldSteps]) -> tuple[LayoutStep, ...]:
    """By layout, in order of their names. `worlds`: of one job, the newest first. The newest world with enough steps
    stands for its layout; a world of fewer than that only where no other has the layout."""
    found: dict[str, LayoutStep] = {}
    short: dict[str, LayoutStep] = {}
    changed = 1.0
    for world in worlds:
        warm = world.seconds[WARM_UP_STEPS:]
        if len(warm) >= STEPS_MIN:
            found.setdefault(world.layout, _measured(world.layout, warm[-WINDOW_STEPS:], changed))
            changed *= median(warm[-WINDOW_STEPS:]) / median(warm[:WINDOW_STEPS])
        elif len(world.seconds) >= STEPS_MIN:
            short.setdefault(world.layout, _measured(world.layout, world.seconds, changed))
    return tuple(sorted((short | found).values(), key=lambda item: item.layout))


def _measured(layout: str, steps: tuple[float, ...], changed: float) -> LayoutStep:
    middle = median(steps)
    spread = median(abs(each - middle) for each in steps) / middle
    return LayoutStep(layout, middle * changed, _MEDIAN_ERROR * spread / len(steps) ** 0.5)
