"""Watches one source and reports notices as facts (one per kind, with the earliest deadline) and the source's health.

A mock server's `time` may drift with every poll. So a new deadline replaces the known one only if it is more than a
second earlier.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from agent.notices.source import Announced, Announcement, Nothing, NoticeSource, Observation, Unknown
from agent.protocol.sync import NoticeFact, NoticeKind

DEADLINE_DRIFT = timedelta(seconds=1)


class SourceState(StrEnum):
    """Whether the source can be read right now."""

    STARTING = "starting"
    WATCHING = "watching"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """`reason` is empty only while watching."""

    source: str
    state: SourceState
    reason: str
    since_utc: datetime


class NoticeWatcher:
    """`on_fact` is awaited for each new or earlier announcement, `on_health` for each change of health."""

    def __init__(
        self,
        source: NoticeSource,
        *,
        node_id: str,
        on_fact: Callable[[NoticeFact], Awaitable[None]],
        on_health: Callable[[SourceHealth], Awaitable[None]],
        now: Callable[[], datetime],
    ) -> None:
        self._source = source
        self._node_id = node_id
        self._on_fact = on_fact
        self._on_health = on_health
        self._now = now
        self._known: dict[NoticeKind, NoticeFact] = {}
        self.health = SourceHealth(source.name, SourceState.STARTING, "not read yet", now())

    async def run(self) -> None:
        """Read the source until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await self.take(await self._source.observe())
            await asyncio.sleep(max(0.0, self._source.interval_s - (loop.time() - started)))

    async def take(self, observation: Observation) -> None:
        """Report what one observation changes."""
        match observation:
            case Nothing():
                await self._set_health(SourceState.WATCHING, "")
            case Announced(announcements):
                await self._set_health(SourceState.WATCHING, "")
                await self._take_announcements(announcements)
            case Unknown(reason, announcements):
                await self._set_health(SourceState.UNKNOWN, reason)
                await self._take_announcements(announcements)

    async def _take_announcements(self, announcements: tuple[Announcement, ...]) -> None:
        for announcement in announcements:
            known = self._known.get(announcement.kind)
            if known is not None and not _is_earlier(announcement.deadline_utc, known.deadline_utc):
                continue
            fact = NoticeFact(
                node_id=self._node_id,
                kind=announcement.kind,
                source=self._source.name,
                deadline_utc=announcement.deadline_utc,
                first_seen_utc=self._now() if known is None else known.first_seen_utc,
                raw=announcement.raw,
            )
            self._known[announcement.kind] = fact
            await self._on_fact(fact)

    async def _set_health(self, state: SourceState, reason: str) -> None:
        if (state, reason) == (self.health.state, self.health.reason):
            return
        self.health = SourceHealth(self._source.name, state, reason, self._now())
        await self._on_health(self.health)


def _is_earlier(deadline: datetime | None, known: datetime | None) -> bool:
    if deadline is None:
        return False
    return known is None or deadline < known - DEADLINE_DRIFT
