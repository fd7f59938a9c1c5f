"""What cannot wait: a node will go, or agents have new orders. All threads share one interpreter, so work that can wait
a little pauses meanwhile, where it holds nothing that the other needs. So what may have to wait for the row of another
node, as messages of clouds do, does not press.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LET_PASS_S = 0.05
"""So long a piece of work pauses in all: where something presses all the time, the rest goes on all the same."""


class Pressing:
    """Counts what presses just now. Used by any thread."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()
        self._is_calm = threading.Event()
        self._is_calm.set()

    @property
    def is_on(self) -> bool:
        """Whether anything presses."""
        return not self._is_calm.is_set()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within it, others let this pass."""
        with self._lock:
            self._count += 1
            self._is_calm.clear()
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._is_calm.set()

    def let_pass(self, within_s: float | None = None) -> Callable[[], None]:
        """For one piece of work that can wait: call it wherever that may pause. It returns once nothing presses, or
        once the work has paused for so long in all."""
        left_s = LET_PASS_S if within_s is None else within_s

        def pause() -> None:
            nonlocal left_s
            if left_s > 0 and self.is_on:
                began_s = time.monotonic()
                self._is_calm.wait(left_s)
                left_s -= time.monotonic() - began_s

        return pause
