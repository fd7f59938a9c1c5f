"""Messages that several readers have at the same time are stored in one transaction: what waits while one is under way
is the next one.

A statement then is one for all of them, and rows that many messages change are locked once. Whoever stores gets an
answer only after the commit.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

ReadingT = TypeVar("ReadingT")
MOST = 256
"""So many messages are stored at once, if a single reader has not more."""
_log = logging.getLogger(__name__)


class _Ask(Generic[ReadingT]):
    """What one reader has. `error`: why it is not stored."""

    def __init__(self, readings: Sequence[ReadingT]) -> None:
        self.readings = readings
        self.is_done = False
        self.error: Exception | None = None


class StoredTogether(Generic[ReadingT]):
    """`commit` stores what it gets in one transaction, or raises and has stored nothing; called once at a time."""

    def __init__(self, commit: Callable[[Sequence[ReadingT]], None], *, most: int = MOST) -> None:
        self._commit = commit
        self._most = most
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: deque[_Ask[ReadingT]] = deque()

    def store(self, readings: Sequence[ReadingT]) -> None:
        """Return once they are committed, all of them. Raises what `commit` raises for them alone; then none is."""
        mine = _Ask(readings)
        with self._lock:
            self._waiting.append(mine)
        with self._turn:
            # Whoever had the turn before may have stored it already.
            while not mine.is_done:
                self._store(self._taken())
        if mine.error is not None:
            raise mine.error

    def _taken(self) -> list[_Ask[ReadingT]]:
        """The next to store, as they came."""
        with self._lock:
            taken = [self._waiting.popleft()]
            count = len(taken[0].readings)
            while self._waiting and count + len(self._waiting[0].readings) <= self._most:
                count += len(self._waiting[0].readings)
                taken.append(self._waiting.popleft())
        return taken

    def _store(self, asks: Sequence[_Ask[ReadingT]]) -> None:
        try:
            self._commit([reading for ask in asks for reading in ask.readings])
        except Exception as error:
            if len(asks) > 1:
                # Of one reader's messages that cannot be stored the others must not suffer.
                _log.debug("%d batches are stored one by one: %s", len(asks), error)
                for ask in asks:
                    self._store([ask])
                return
            asks[0].error = error
        for ask in asks:
            ask.is_done = True
