"""What an agent makes of a wall clock that is put forward or back while it runs: nothing, until it has stayed so long
that no handoff of before is still under way. Pure: clocks come in as functions."""

import time

from liver_core.steady_clock import Clock, SteadyClock

JUMP_S = 0.5
BELIEVED_AFTER_S = 600.0


class WallClock:
    """Keeps `clock` steady through jumps of the wall clock, and right in the long run."""

    def __init__(self, clock: SteadyClock, wall: Clock = time.time, monotonic: Clock = time.monotonic) -> None:
        self._clock = clock
        self._wall = wall
        self._monotonic = monotonic
        self._ahead_s = 0.0
        self._since = 0.0

    def check(self) -> str | None:
        """Call about once a second. What there is to say of it, if that is news."""
        now, ahead_s = self._monotonic(), self._wall() - self._clock.now()
        if abs(ahead_s - self._ahead_s) > JUMP_S:
            self._ahead_s, self._since = (ahead_s, now) if abs(ahead_s) > JUMP_S else (0.0, now)
            if not self._ahead_s:
                return "the wall clock is back where it was before it was put off"
            return f"the wall clock was {_put(ahead_s)}: ignored, and believed after {BELIEVED_AFTER_S:g} s"
        if self._ahead_s and now - self._since >= BELIEVED_AFTER_S:
            self._clock.zero += ahead_s
            self._ahead_s = 0.0
            return f"the wall clock, which was {_put(ahead_s)} {BELIEVED_AFTER_S:g} s ago, is believed from now on"
        return None


def _put(ahead_s: float) -> str:
    return f"put {'forward' if ahead_s > 0 else 'back'} by {abs(ahead_s):.1f} s"
