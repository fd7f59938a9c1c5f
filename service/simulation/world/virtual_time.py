"""A clock that stands still until somebody runs it to the next thing that is due. Pure."""

import heapq
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")

ACTIONS_MAX = 5_000_000
"""Between two events of a trace; more of them are a loop."""


class VirtualTime:
    """Seconds since it began. Things that are due at one moment happen in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0

    def at(self, when_s: float, action: Callable[[*Ts], None], *args: *Ts) -> None:
        """Not before now."""
        self._number += 1
        heapq.heappush(self._due, (max(when_s, self.now), self._number, action, args))

    def after(self, seconds: float, action: Callable[[*Ts], None], *args: *Ts) -> None:
        self.at(self.now + seconds, action, *args)

    @property
    def events(self) -> int:
        """How many actions were asked for."""
        return self._number

    def run_next(self) -> bool:
        """Run the next action; False when nothing is left."""
        if not self._due:
            return False
        self.now, _, action, args = heapq.heappop(self._due)
        action(*args)
        return True

    def run_until(self, until_s: float) -> None:
        """Everything that is due before then."""
        for _ in range(ACTIONS_MAX):
            if not self._due or self._due[0][0] >= until_s:
                self.now = max(self.now, until_s)
                return
            self.now, _, action, args = heapq.heappop(self._due)
            action(*args)
        raise AssertionError(f"more than {ACTIONS_MAX} things happen before {until_s:g} s")
