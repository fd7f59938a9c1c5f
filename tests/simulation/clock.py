"""The virtual clock: a queue of things that will happen. Pure."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Runs actions in the order of their times; equal times keep the order in which they were asked for."""

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Run `action(*args)` in `delay_s` seconds."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._number, action, args))

    @property
    def events(self) -> int:
        """How many actions were asked for."""
        return self._number

    def run_next(self) -> bool:
        """Run the next action; False when nothing is left."""
        if not self._heap:
            return False
        self.now, _, action, args = heapq.heappop(self._heap)
        action(*args)
        return True
