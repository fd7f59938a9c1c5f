"""Says which rank hangs: no step and no stage for many times the median step.

Pure: time comes in. It only names; what to do about it is decided elsewhere.
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
    """What one rank process was last heard of. `beat` is called for each step, stage and hello."""

    started_at: float
    beat_at: float = 0.0
    step: int = 0
    stepped_at: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))

    def beat(self, now: float) -> None:
        """Any sign of life that is progress."""
        self.beat_at = now

    def stepped(self, now: float, step: int, seconds: float) -> None:
        """One finished step."""
        self.beat_at = self.stepped_at = now
        self.step = step
        self.seconds.append(seconds)

    def median_s(self) -> float:
        """Median seconds of the last steps, 0 before the first."""
        return median(self.seconds) if self.seconds else 0.0

    def limit_s(self) -> float:
        """How long silence is normal: many median steps, and longer before the first."""
        if not self.seconds:
            return START_S
        return max(LEAST_S, FACTOR * median(self.seconds))

    def hang_reason(self, now: float) -> str:
        """Why this rank is taken to hang; empty while it is not."""
        silent_s = now - max(self.beat_at, self.started_at)
        if silent_s <= self.limit_s():
            return ""
        if not self.seconds:
            return f"no first step and no news for {silent_s:.0f} s (limit {self.limit_s():.0f} s)"
        return (
            f"no step after step {self.step} and no news for {silent_s:.0f} s; "
            f"limit {self.limit_s():.0f} s at a median step of {median(self.seconds):.2f} s"
        )
