"""Looks at the database once a second for all browsers together, while there are any, and keeps the last events."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from service.context import Context
from service.events.queries import Seen, look
from service.events.rules import Ring, StreamEvent
from service.problems import ProblemError, unavailable
from service.tokens.operations import Caller

LOOK_S = 1.0
STREAMS_MAX, OF_A_TOKEN_MAX = 256, 8
_log = logging.getLogger(__name__)


class Feed:
    """One per application. Used in its event loop only."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ring = Ring(secrets.token_hex(4))
        self._seen = Seen()
        self._wanted: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def subscribed(self, caller: Caller, job_ids: Sequence[str], last_id: str | None) -> AsyncIterator["Stream"]:
        """A stream of one browser. Raises 503 where there are too many, of all or of this token."""
        if self._streams.total() >= STREAMS_MAX or self._streams[caller.token_id] >= OF_A_TOKEN_MAX:
            raise ProblemError(
                unavailable("too many open streams; close a page, or try again later"), headers={"Retry-After": "10"}
            )
        self._streams[caller.token_id] += 1
        self._wanted.update(job_ids)
        if self._looking is None:
            # What changed while nobody watched is not known.
            self._ring, self._seen = Ring(secrets.token_hex(4)), Seen()
            self._looking = asyncio.create_task(self._look_on())
        try:
            yield Stream(self, tuple(job_ids), last_id)
        finally:
            self._streams[caller.token_id] -= 1
            self._wanted.subtract(job_ids)
            self._streams, self._wanted = +self._streams, +self._wanted
            if not self._streams and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    @property
    def ring(self) -> Ring:
        """The last events."""
        return self._ring

    async def wait(self, most_s: float) -> None:
        """Until there is something new, or for so long."""
        changed = self._changed
        try:
            async with asyncio.timeout(most_s):
                await changed.wait()
        except TimeoutError:
            return

    async def _look_on(self) -> None:
        while not self._context.hub.stopping:
            try:
                found = await self._context.people.run(self._look, dict(self._wanted))
            except (ProblemError, SQLAlchemyError) as error:
                _log.debug("no look at what has changed: %s", error)
                found = []
            for name, data, job_id in found:
                self._ring.add(name, data, job_id)
            if found:
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(LOOK_S)

    def _look(self, wanted: dict[str, int]) -> list[tuple[str, str, str | None]]:
        found: list[tuple[str, str, str | None]] = []

        def publish(name: str, data: BaseModel, job_id: str | None) -> None:
            found.append((name, data.model_dump_json(by_alias=True), job_id))

        with self._context.people.sessions() as session:
            look(session, self._seen, wanted, publish, now=self._context.clock())
        return found


class Stream:
    """What one browser is still to get."""

    def __init__(self, feed: Feed, job_ids: tuple[str, ...], last_id: str | None) -> None:
        self._feed = feed
        self._job_ids = job_ids
        place = feed.ring.place(last_id)
        self.resumed = place is not None
        self._place = feed.ring.newest if place is None else place

    @property
    def id(self) -> str:
        """Of the last event that it got."""
        return self._feed.ring.id_of(self._place)

    def missed(self) -> bool:
        """Whether events that it has not got are kept no more: it goes on with the newest."""
        if self._feed.ring.holds(self._place):
            return False
        self._place = self._feed.ring.newest
        return True

    def next(self) -> list[tuple[str, StreamEvent]]:
        """What is new, each with its id."""
        found = self._feed.ring.behind(self._place, self._job_ids)
        self._place = self._feed.ring.newest
        return [(self._feed.ring.id_of(event.number), event) for event in found]
