"""Who shares threads and connections with whom: agents with agents, people and scripts with each other.

A place is the right to one connection, and there are never more places than connections. Work of `run` has a thread of
its lane for its place, so that nobody who has a connection waits for a thread, nor the other way round. Whoever gets no
place in time is refused, and should try again. All threads share one interpreter: so few read at a time (`Readers`).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from sqlalchemy.orm import Session, sessionmaker

from service.db.outage import Outage
from service.problems import ProblemError, too_many, unavailable

ReturnT = TypeVar("ReturnT")
PEOPLE_WAIT_S = 1.0
AGENTS_WAIT_S = 5.0
"""Less than agents wait for an answer."""
FOR_MANY = 3
"""So many places are left to work that is done for many callers at once: it need not wait for a crowd that is served
one by one."""
READING_THREADS = 2
READERS_AT_ONCE = 2
"""One computes while the database answers the other: more would only take the interpreter from agents."""
YIELDS_S = 0.02
"""So long a read lets agents go first: where they are served all the time, it would never begin."""
WAITING_OF_ONE_MAX = 8
"""Reads of one token that wait for their turn. Turns are given in order: all others wait for so few of them at most."""
WAITED_ENOUGH_S = 1.0


class Lane:
    """Of one kind of callers. `sessions` has `places` connections, and `reading` uses the same: its sessions only read,
    and each statement sees what was committed before it. `wait_s`: how long somebody waits for a place."""

    def __init__(
        self,
        sessions: sessionmaker[Session],
        reading: sessionmaker[Session],
        *,
        places: int,
        wait_s: float,
        whose: str,
        outage: Outage,
    ) -> None:
        self.sessions = sessions
        self.reading = reading
        self._outage = outage
        self._whose = whose
        self._at_work = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._wait_s = wait_s
        self._places = asyncio.Semaphore(places)
        self._alone = asyncio.Semaphore(max(1, places - FOR_MANY))
        self._threads = CapacityLimiter(places)
        self._readers = CapacityLimiter(READING_THREADS)

    @asynccontextmanager
    async def place(self, *, alone: bool = False) -> AsyncIterator[None]:
        """A place within it; `alone`: one that only this caller gains from. Raises 503."""
        self._at_work += 1
        self._is_quiet.clear()
        turns: list[asyncio.Semaphore] = []
        try:
            for turn in (self._alone, self._places) if alone else (self._places,):
                if not await _has_acquired(turn, self._wait_s):
                    raise _unavailable(self._whose, self._outage, "nothing was changed, try again")
                turns.append(turn)
            yield
        finally:
            for turn in turns:
                turn.release()
            self._at_work -= 1
            if self._at_work == 0:
                self._is_quiet.set()

    async def quiet(self, within_s: float) -> None:
        """Return once nobody has a place or waits for one, or after so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_quiet.wait()

    async def run(self, work: Callable[..., ReturnT], *arguments: object, alone: bool = False) -> ReturnT:
        """Work that uses one session, begun and ended in it. Raises 503."""
        async with self.place(alone=alone):
            return await to_thread.run_sync(work, *arguments, limiter=self._threads)

    async def compute(self, work: Callable[..., ReturnT], *arguments: object) -> ReturnT:
        """Work that takes processor time and no connection, off the event loop."""
        return await to_thread.run_sync(work, *arguments, limiter=self._readers)


class Readers:
    """Of people and scripts who only read: `at_once` at a time. `agents`: whom they let go first."""

    def __init__(
        self, agents: Lane, *, outage: Outage, at_once: int = READERS_AT_ONCE, wait_s: float = PEOPLE_WAIT_S
    ) -> None:
        self._agents = agents
        self._outage = outage
        self._wait_s = wait_s
        self._turns = asyncio.Semaphore(at_once)
        self._waiting: Counter[str] = Counter()

    async def begin(self, caller: str) -> Callable[[], None]:
        """Wait for a turn, and return what ends it; to call that again does nothing. Raises 429 where enough reads of
        this caller wait, and 503."""
        if self._waiting[caller] >= WAITING_OF_ONE_MAX:
            detail = f"{WAITING_OF_ONE_MAX} reads of this token wait for their turn; ask again once they are answered"
            raise too_many(detail, wait_s=WAITED_ENOUGH_S)
        self._waiting[caller] += 1
        try:
            # Not while it has a turn: what waits for agents would keep others from reading.
            await self._agents.quiet(YIELDS_S)
            if not await _has_acquired(self._turns, self._wait_s):
                raise _unavailable("people and scripts", self._outage, "try again")
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._turns.release()

        return end


async def _has_acquired(places: asyncio.Semaphore, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return await places.acquire()
    except TimeoutError:
        return False


def _unavailable(whose: str, outage: Outage, what_now: str) -> ProblemError:
    """503 with why nobody's turn ended meanwhile."""
    cause = "the database does not answer" if outage.is_on else f"too many requests of {whose} at a time"
    return ProblemError(unavailable(f"{cause}; {what_now}"))
