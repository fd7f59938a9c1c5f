"""Watches one source: reports what becomes of its notices as facts, and the source's health.

What a fact means, and which announcement is another notice, is decided in `agent.protocol.notice_life`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from agent.notices.source import Announced, Announcement, Nothing, NoticeSource, Observation, Unknown
from agent.protocol.notice_life import ends_utc, hear, withdraw
from agent.protocol.sync import NoticeFact, NoticeKind, SourceHealth, SourceState

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
        self._known = {(fact.source, fact.kind): fact for fact in known}
        self._turned_at = time.monotonic()
        self.health = SourceHealth(
            source=source.name,
            state=SourceState.STARTING,
            reason="not read yet",
            since_utc=now(),
            announces=tuple(
                sorted(
                    kind
                    for (name, kind), fact in self._known.items()
                    if name == source.name and fact.withdrawn_utc is None
                )
            ),
        )

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
                heard = {*self.health.announces, *(item.kind for item in announcements)}
                await self._set_health(SourceState.UNKNOWN, reason, heard)
                await self._hear(announcements)

    async def _take_read(self, announcements: tuple[Announcement, ...]) -> None:
        """Everything that the source announces now: a notice that is not among it is withdrawn."""
        announced = {item.kind for item in announcements}
        await self._set_health(SourceState.WATCHING, "", announced)
        await self._hear(announcements)
        now = self._now()
        for (source, kind), fact in tuple(self._known.items()):
            is_ours = source == self._source.name
            if is_ours and kind in announced:
                continue
            if now >= ends_utc(fact):
                # While it is announced it is kept even so: the same announcement must not become another notice.
                del self._known[source, kind]
                await self._on_over(fact)
            elif is_ours and fact.withdrawn_utc is None:
                await self._tell(withdraw(fact, now))

    async def _hear(self, announcements: tuple[Announcement, ...]) -> None:
        for item in announcements:
            known = self._known.get((self._source.name, item.kind))
            if known is not None and known.withdrawn_utc is None and item.is_estimate:
                continue
            said = NoticeFact(
                node_id=self._node_id,
                kind=item.kind,
                source=self._source.name,
                deadline_utc=item.deadline_utc,
                first_seen_utc=self._now(),
                raw=item.raw,
            )
            fact = hear(known, said)
            if fact is not None:
                await self._tell(fact)

    async def _tell(self, fact: NoticeFact) -> None:
        self._known[fact.source, fact.kind] = fact
        await self._on_fact(fact)

    async def _set_health(self, state: SourceState, reason: str, announced: Iterable[NoticeKind]) -> None:
        since = self.health.since_utc if state is self.health.state else self._now()
        health = SourceHealth(
            source=self._source.name,
            state=state,
            reason=reason[:REASON_CHARS_MAX],
            since_utc=since,
            announces=tuple(sorted(announced)),
        )
        if health != self.health:
            self.health = health
            await self._on_health(health)
