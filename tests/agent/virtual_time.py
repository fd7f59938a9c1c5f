"""An event loop whose clock a test does not wait for: where nothing is ready, time passes at once to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
THREAD_WAIT_S = 5.0
"""How long a loop without timers may wait for a thread."""


class _Selector(selectors.DefaultSelector):
    """Never waits for time to pass, only for what threads and sockets bring."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(THREAD_WAIT_S)
        found = super().select(0)
        if not found:
            self.passed_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.passed_s


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What `asyncio.run` does, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
