"""Detects a rank that hangs: no step and no stage for many times the median step, or a process that is stopped.

Pure: time is an argument. It only reports; the driver decides what to do.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from liver_core.handoff.rung_costs import deviation

HISTORY_STEPS = 32
DEVIATION_STEPS = 5
FACTOR = 20.0
LEAST_S = 30.0
START_S = 300.0
STOPPED_LEAST_S = 5.0
"""Ranks miss a peer after no less than this, so what was stopped for less was not missed."""
STOP_COUNTS_S = 30.0
"""Ranks wait for each other for no longer than this: what they miss later is not for a stop before."""
AWAY_S = 5.0
"""Who looks about once a second and has not for so long was away itself, and has heard nobody."""
ASKED_AFTER_S, ASKED_EVERY_S = 10.0, 5.0
"""A rank that has said nothing for so long is asked where it is, again after so long."""
STOP_SHOWS_S = 5.0
"""For so long after it went on, or until its next step, a stop is still told: others may just be giving up."""


@dataclass(slots=True)
class RankPulse:
    """The last signs of life of one rank process. `beat` is called for each step, stage and hello."""

    started_at: float
    beat_at: float = 0.0
    step: int = 0
    stepped_at: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))
    stopped_at: float | None = None
    resumed_at: float | None = None
    looked_at: float | None = None
    asked_at: float | None = None

    def beat(self, now: float) -> None:
        """Record a sign of progress."""
        self.beat_at = now

    def stepped(self, now: float, step: int, seconds: float) -> None:
        """Record one finished step."""
        self.beat_at = self.stepped_at = now
        self.stopped_at = self.resumed_at = None
        self.step = step
        self.seconds.append(seconds)

    def median_s(self) -> float:
        """Median seconds of the last steps, 0 before the first."""
        return median(self.seconds) if self.seconds else 0.0

    def step_age_s(self, now: float) -> float:
        """Seconds since its last step, 0 before the first."""
        return now - self.stepped_at if self.seconds else 0.0

    def deviation_s(self) -> float | None:
        """How far the last steps lie from their median, in the median; None with too few of them to say."""
        return deviation(self.seconds) if len(self.seconds) >= DEVIATION_STEPS else None

    def limit_s(self) -> float:
        """How long a rank may be silent: many median steps; longer before the first step."""
        if not self.seconds:
            return START_S
        return max(LEAST_S, FACTOR * median(self.seconds))

    def look(self, now: float, *, stopped: bool) -> None:
        """Record whether the process is stopped. Call about once a second: time in which nobody looked does not count
        against the rank, since it was the agent that stood still."""
        if self.looked_at is not None and now - self.looked_at > AWAY_S:
            self.beat_at = now
        self.looked_at = now
        if stopped and (self.stopped_at is None or self.resumed_at is not None):
            self.stopped_at, self.resumed_at = now, None
        elif not stopped and self.stopped_at is not None and self.resumed_at is None:
            self.resumed_at = now

    @property
    def is_stopped(self) -> bool:
        """Whether it was when it was last looked at."""
        return self.stopped_at is not None and self.resumed_at is None

    def stopped_s(self, now: float) -> float:
        """For how many seconds the process is stopped, or was before it went on, if it has made no step since; 0 where
        that is too short to be missed."""
        if self.stopped_at is None:
            return 0.0
        until = now if self.resumed_at is None else self.resumed_at
        if now - until > STOP_COUNTS_S:
            return 0.0
        seconds = until - self.stopped_at
        return seconds if seconds >= STOPPED_LEAST_S else 0.0

    def stop_reason(self, now: float) -> str:
        """That it is stopped, or was just before; empty if not."""
        stopped_s = self.stopped_s(now)
        if not stopped_s or (self.resumed_at is not None and now - self.resumed_at > STOP_SHOWS_S):
            return ""
        has = "has been" if self.is_stopped else "was"
        return f"its process {has} stopped for {stopped_s:.0f} s, by a signal or a debugger"

    def asks(self, now: float) -> bool:
        """Whether to ask the rank where it is; then it is not asked again for a while."""
        since = max(self.beat_at, self.started_at) + ASKED_AFTER_S
        if now < since or (self.asked_at is not None and now - self.asked_at < ASKED_EVERY_S):
            return False
        self.asked_at = now
        return True

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
