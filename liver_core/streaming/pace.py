"""How fast a stream copies and replays, and how often it looks whether there is anything new. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

BUSY_S_MOST, IDLE_S_MOST, FIRST_SLEEP_S_MOST = 0.03, 0.25, 1.0
"""Of one sleep: while something is missing or the step is not known, while nothing is, and after a replay."""


@dataclass(slots=True)
class Pace:
    """Smoothed seconds per element, the seconds of a step of the source world (0 while they are not known), and what
    was slept since the last replay."""

    copy_s: float | None = None
    fetch_s: float = 0.0
    replay_s: float | None = None
    step_s: float = 0.0
    slept_s: float = 0.0

    def copied(self, seconds: float, elements: int) -> None:
        self.copy_s = _smoothed(self.copy_s, seconds / max(elements, 1))

    def fetched(self, seconds: float, elements: int) -> None:
        self.fetch_s = _smoothed(self.fetch_s or None, seconds / max(elements, 1))

    def replayed(self, seconds: float, elements: int) -> None:
        self.replay_s = _smoothed(self.replay_s, seconds / max(elements, 1))
        self.slept_s = 0.0

    def estimate(self, todo: int, elements: int) -> float | None:
        """Of each step, the resident share x takes x * load for its replay; the rest copies.

        With T the seconds to copy everything at full speed, dx/dt = (1 - load * x) / T.
        """
        if not todo:
            return 0.0
        if self.copy_s is None:
            return None
        whole, at = self.copy_s * elements, 1 - todo / elements
        if self.replay_s is None or self.step_s <= 0:
            return whole * (1 - at)
        load = (self.replay_s + self.fetch_s) * elements / self.step_s
        if load >= 1:
            return inf
        return whole * (1 - at) if load < 1e-9 else whole * log((1 - load * at) / (1 - load)) / load

    def sleep(self, least_s: float, *, idle: bool) -> float:
        """Seconds to sleep before the next look at the sources; the looks of an `idle` follower are few.

        A source publishes once a step: who has just replayed one and lacks nothing looks again after half a step.
        While the step is not known, a third of what was slept already is late enough.
        """
        if self.step_s <= 0:
            seconds = min(self.slept_s / 3, BUSY_S_MOST)
        elif idle and not self.slept_s:
            seconds = min(self.step_s / 2, FIRST_SLEEP_S_MOST)
        else:
            seconds = min(self.step_s / 12, IDLE_S_MOST if idle else BUSY_S_MOST)
        seconds = max(least_s, seconds)
        self.slept_s += seconds
        return seconds

    def __str__(self) -> str:
        parts = (("copy", self.copy_s), ("fetch", self.fetch_s), ("replay", self.replay_s))
        per_element = ", ".join(f"{name} {(value or 0.0) * 1e9:.3g} ns" for name, value in parts)
        return f"{per_element} an element, step {self.step_s:.3g} s"


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else 0.7 * old + 0.3 * new
