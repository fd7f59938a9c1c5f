"""Detects a rank that hangs: no step and no stage for many times the median step.

Pure: time is an argument. It only reports; the driver decides what to do.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

HISTORY_STEPS = 32
FACTOR = 20.0
LEAST_S = 30.0
START_S = 300.0


@dataclass(slots=True)
class RankPulse:
    """The last signs of life of one rank process. `beat` is called for each step, stage and hello."""

    started_at: float
    beat_at: float = 0.0
    step: int = 0
    stepped_at: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))

    def beat(self, now: float) -> None:
        """Record a sign of progress."""
        self.beat_at = now

    def stepped(self, now: float, step: int, seconds: float) -> None:
        """Record one finished step."""
        self.beat_at = self.stepped_at = now
        self.step = step
        self.seconds.append(seconds)

    def median_s(self) -> float:
        """Median seconds of the last steps, 0 before the first."""
        return median(self.seconds) if self.seconds else 0.0

    def limit_s(self) -> float:
        """How long a rank may be silent: many median steps; longer before the first step."""
        if not self.seconds:
            return START_S
        return max(LEAST_S, FACTOR * median(self.seconds))

    def hang_reason(self, now: float) -> str:
        """Why this rank counts as hanging; empty if it does not."""
        silent_s = now - max(self.beat_at, self.started_at)
        if silent_s <= self.limit_s():
            return ""
        if not self.seconds:
            return f"no first step and no report for {silent_s:.0f} s (limit {self.limit_s():.0f} s)"
        return (
            f"no step after step {self.step} and no report for {silent_s:.0f} s; "
            f"limit {self.limit_s():.0f} s at a median step of {median(self.seconds):.2f} s"
        )
