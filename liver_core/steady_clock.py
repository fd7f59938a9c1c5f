"""UTC that does not jump.

Deadlines of a handoff are moments in UTC, and the wall clock of a machine may be put forward or back by minutes at any
time. So nobody reads it while working: an agent goes on from what it was when the agent began, by the machine's
monotonic clock, and the ranks of the machine count as their agent does.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]


class SteadyClock:
    """`zero`: seconds since 1970, UTC, at the zero of the machine's monotonic clock, which all its processes share."""

    def __init__(self, wall: Clock = time.time, monotonic: Clock = time.monotonic) -> None:
        self._monotonic = monotonic
        self.zero = wall() - monotonic()

    def now(self) -> float:
        """Seconds since 1970, UTC."""
        return self.zero + self._monotonic()

    def utc_at(self, monotonic_s: float) -> float:
        """A moment of the monotonic clock in seconds since 1970, UTC."""
        return self.zero + monotonic_s

    def monotonic_at(self, at_utc: float) -> float:
        """`at_utc`, seconds since 1970, on the monotonic clock; not before now."""
        return self._monotonic() + max(0.0, at_utc - self.now())


PROCESS_CLOCK = SteadyClock()
utc_now = PROCESS_CLOCK.now
