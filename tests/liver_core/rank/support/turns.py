"""Real threads of which one runs at a time. Wherever one may be preempted, the seed says who goes on.

A thread may lose its turn at each lock, wait, thread start and callback of the code under test, which are given to it
as `SeededCondition`, `Turns.spawn` and `Turns.switch`. Time passes only when all threads wait.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

SWITCHES_MAX = 20_000


class Stuck(AssertionError):
    """No thread can go on."""


@dataclass(slots=True, eq=False)
class _Turn:
    name: str
    action: Callable[[], None]
    may_run: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits_for: Callable[[], bool] | None = None
    until: float | None = None
    is_over: bool = False


class Turns:
    """One run. `now`: virtual seconds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.trail: list[str] = []
        self._turns: list[_Turn] = []
        self.current: _Turn | None = None
        self._all_over = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._switches = 0

    def spawn(self, name: str, action: Callable[[], None]) -> None:
        """A thread that takes part from now on."""
        self._turns.append(_Turn(name, action))
        if self.current is not None:
            threading.Thread(target=self._live, args=(self._turns[-1],), daemon=True).start()
            self.switch()

    def run(self) -> None:
        """Until all threads have ended. Raises what one of them raised, or Stuck."""
        for turn in self._turns:
            threading.Thread(target=self._live, args=(turn,), daemon=True).start()
        self._give(self._next())
        assert self._all_over.acquire(timeout=60.0), f"a thread does not come back: {self.trail[-5:]}"
        if self._error is not None:
            raise self._error

    def switch(self) -> None:
        """The thread that runs may be preempted here."""
        self._wait(None, None)

    def wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Until the condition holds, or the time is over."""
        self._wait(condition, None if timeout_s is None else self.now + timeout_s)

    def _wait(self, condition: Callable[[], bool] | None, until: float | None) -> None:
        turn = self.current
        assert turn is not None
        turn.waits_for, turn.until = condition, until
        following = self._next()
        if following is not turn:
            self._give(following)
            turn.may_run.acquire()
        turn.waits_for = turn.until = None
        if self._error is not None:
            raise SystemExit

    def _next(self) -> _Turn | None:
        self._switches += 1
        if self._switches > SWITCHES_MAX:
            self._error = self._error or Stuck(f"no end in sight: {self.trail[-5:]}")
        living = [turn for turn in self._turns if not turn.is_over]
        if not living:
            return None
        ready = [turn for turn in living if self._error is not None or turn.waits_for is None or turn.waits_for()]
        if not ready:
            timed = [turn.until for turn in living if turn.until is not None]
            if not timed:
                names = ", ".join(turn.name for turn in living)
                self._error = Stuck(f"these wait for each other: {names}")
                return self._next()
            self.now = max(self.now, min(timed))
        ready = ready or [turn for turn in living if turn.until is not None and turn.until <= self.now]
        return self.random.choice(ready)

    def _give(self, turn: _Turn | None) -> None:
        self.current = turn
        if turn is None:
            self._all_over.release()
        else:
            turn.may_run.release()

    def _live(self, turn: _Turn) -> None:
        turn.may_run.acquire()
        try:
            if self._error is None:
                turn.action()
        except SystemExit:
            pass
        except BaseException as error:
            self._error = self._error or error
        turn.is_over = True
        self._give(self._next())


class SeededCondition:
    """A threading.Condition over an RLock, for threads that take turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._owner: _Turn | None = None
        self._depth = 0
        self._notified = 0

    def __enter__(self) -> bool:
        me = self._turns.current
        if self._owner is not me:
            self._turns.wait(lambda: self._owner is None)
        self._owner, self._depth = me, self._depth + 1
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._turns.switch()

    def wait(self, timeout: float | None = None) -> None:
        """Let go of the lock, however often it is held, until somebody notifies or the time is over."""
        me, depth, before = self._owner, self._depth, self._notified
        self._owner, self._depth = None, 0
        self._turns.wait(lambda: self._notified > before, timeout)
        self._turns.wait(lambda: self._owner is None)
        self._owner, self._depth = me, depth

    def notify_all(self) -> None:
        """Wake who waits."""
        self._notified += 1
