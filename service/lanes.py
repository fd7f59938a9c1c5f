"""Who shares threads and connections with whom: agents with agents, people and scripts with each other.

A place is the right to one connection, and there are never more places than connections. Work of `run` has a thread of
its lane for its place, so that nobody who has a connection waits for a thread, nor the other way round. Whoever gets no
place in time is refused, and should try again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from sqlalchemy.orm import Session, sessionmaker

from service.problems import ProblemError, unavailable

ReturnT = TypeVar("ReturnT")
PEOPLE_WAIT_S = 1.0
AGENTS_WAIT_S = 5.0
"""Less than agents wait for an answer."""
READING_THREADS = 2


class Lane:
    """Of one kind of callers. `sessions` has `places` connections; `wait_s`: how long somebody waits for one."""

    def __init__(self, sessions: sessionmaker[Session], *, places: int, wait_s: float, whose: str) -> None:
        self.sessions = sessions
        self._whose = whose
        self._wait_s = wait_s
        self._places = asyncio.Semaphore(places)
        self._threads = CapacityLimiter(places)
        self._readers = CapacityLimiter(READING_THREADS)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place within it. Raises 503."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except TimeoutError:
            detail = f"too many requests of {self._whose} at a time; nothing was changed, try again"
            raise ProblemError(unavailable(detail)) from None
        try:
            yield
        finally:
            self._places.release()

    async def run(self, work: Callable[..., ReturnT], *arguments: object) -> ReturnT:
        """Work that uses one session, begun and ended in it. Raises 503."""
        async with self.place():
            return await to_thread.run_sync(work, *arguments, limiter=self._threads)

    async def compute(self, work: Callable[..., ReturnT], *arguments: object) -> ReturnT:
        """Work that takes processor time and no connection, off the event loop."""
        return await to_thread.run_sync(work, *arguments, limiter=self._readers)
