"""Watches one source: reports what becomes of its notices as facts, and the source's health.

What a fact means, and which announcement is another notice, is decided in `agent.protocol.notice_life`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from agent.notices.source import Announced, Announcement, Nothing, NoticeSource, Observation, Unknown
from agent.protocol.notice_life import NoticeKey, ends_utc, hear, key_of, withdraw
from agent.protocol.sync import NoticeFact, SourceHealth, SourceState

REASON_CHARS_MAX = 500
STUCK_S = 60.0
"""Twice what the slowest source waits."""


class NoticeWatcher:
    """`on_fact` is awaited for each notice that is new, has come nearer or is withdrawn; `on_over` for one that nobody
    has to remember any more; `on_health` for each change of health. `known`: what an earlier watcher of the node told.
    """

    def __init__(
        self,
        source: NoticeSource,
        *,
        node_id: str,
        known: Iterable[NoticeFact] = (),
        on_fact: Callable[[NoticeFact], Awaitable[None]],
        on_over: Callable[[NoticeFact], Awaitable[None]],
        on_health: Callable[[SourceHealth], Awaitable[None]],
        now: Callable[[], datetime],
    ) -> None:
        self._source = source
        self._node_id = node_id
        self._on_fact = on_fact
        self._on_over = on_over
        self._on_health = on_health
        self._now = now
        self._known = {key_of(fact): fact for fact in known}
        self._turned_at = time.monotonic()
        self.health = self._health_of(SourceState.STARTING, "not read yet", now(), self._announced())

    async def run(self) -> None:
        """Read the source until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started, self._turned_at = loop.time(), time.monotonic()
            await self.take(await self._source.observe())
            await asyncio.sleep(max(0.0, self._source.interval_s - (loop.time() - started)))

    def is_stuck(self) -> bool:
        """Whether one observation takes far longer than any source may."""
        return time.monotonic() - self._turned_at > self._source.interval_s + STUCK_S

    async def take(self, observation: Observation) -> None:
        """Report what one observation changes. One that is `Unknown` withdraws nothing."""
        match observation:
            case Nothing():
                await self._take_read(())
            case Announced(announcements):
                await self._take_read(announcements)
            case Unknown(reason, announcements):
                await self._hear(announcements, state=SourceState.UNKNOWN, reason=reason, still=self._announced())

    async def _take_read(self, announcements: tuple[Announcement, ...]) -> None:
        """Everything that the source announces now: a notice that is not among it is withdrawn."""
        await self._hear(announcements, state=SourceState.WATCHING)
        now, announced = self._now(), {self._key(item) for item in announcements}
        for key, fact in tuple(self._known.items()):
            if key in announced:
                continue
            if now >= ends_utc(fact):
                # While it is announced it is kept even so: the same announcement must not become another notice.
                del self._known[key]
                await self._on_over(fact)
            elif fact.source == self._source.name and fact.withdrawn_utc is None:
                await self._tell(withdraw(fact, now))

    async def _hear(
        self,
        announcements: tuple[Announcement, ...],
        *,
        state: SourceState,
        reason: str = "",
        still: tuple[NoticeFact, ...] = (),
    ) -> None:
        """`still`: what it may announce beside these."""
        notices = {key_of(fact): fact for fact in still}
        notices |= {self._key(item): self._notice_of(item) for item in announcements}
        await self._set_health(state, reason, notices.values())
        for key, fact in notices.items():
            if fact != self._known.get(key):
                await self._tell(fact)

    def _notice_of(self, item: Announcement) -> NoticeFact:
        """What is known of its notice with it."""
        known = self._known.get(self._key(item))
        if known is not None and known.withdrawn_utc is None and item.is_estimate:
            return known
        said = NoticeFact(
            node_id=self._node_id,
            kind=item.kind,
            source=self._source.name,
            deadline_utc=item.deadline_utc,
            first_seen_utc=self._now(),
            raw=item.raw,
            event_id=item.event_id,
        )
        return hear(known, said) or known or said

    def _key(self, item: Announcement) -> NoticeKey:
        return self._node_id, item.kind, self._source.name, item.event_id

    def _announced(self) -> tuple[NoticeFact, ...]:
        """Of what is known, what this source has not taken back."""
        ours = (fact for fact in self._known.values() if fact.source == self._source.name)
        return tuple(fact for fact in ours if fact.withdrawn_utc is None)

    async def _tell(self, fact: NoticeFact) -> None:
        self._known[key_of(fact)] = fact
        await self._on_fact(fact)

    def _health_of(
        self, state: SourceState, reason: str, since: datetime, announced: Iterable[NoticeFact]
    ) -> SourceHealth:
        """A machine that is still there when its notice is over was not taken at the time that was named."""
        announced, now = tuple(announced), self._now()
        announces = {fact.kind for fact in announced if fact.deadline_utc is None or now < ends_utc(fact)}
        return SourceHealth(
            source=self._source.name,
            state=state,
            reason=reason[:REASON_CHARS_MAX],
            since_utc=since,
            announces=tuple(sorted(announces)),
            overdue=tuple(sorted({fact.kind for fact in announced} - announces)),
        )

    async def _set_health(self, state: SourceState, reason: str, announced: Iterable[NoticeFact]) -> None:
        since = self.health.since_utc if state is self.health.state else self._now()
        health = self._health_of(state, reason, since, announced)
        if health != self.health:
            self.health = health
            await self._on_health(health)
