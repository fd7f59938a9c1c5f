"""The interface of a notice source, and the results of reading one: `Nothing`, `Announced` or `Unknown`.

Pure. A timeout or a server error is `Unknown`, never `Nothing`: a node whose notices cannot be read must not look safe.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from agent.protocol.sync import NoticeKind
from agent.protocol.values import utc
from liver_core.layout.limits import UTC_LEAST, UTC_MOST

RAW_CHARS_MAX = 1_000
_EARLIEST, _LATEST = utc(UTC_LEAST), utc(UTC_MOST)


@dataclass(frozen=True, slots=True)
class Announcement:
    """One announcement of a source. `deadline_utc` is None if the source names no time. `is_estimate`: the source names
    none, and it was counted from the first sight. `event_id`: as in `NoticeFact`."""

    kind: NoticeKind
    deadline_utc: datetime | None
    raw: str
    is_estimate: bool = False
    event_id: str = ""


@dataclass(frozen=True, slots=True)
class Nothing:
    """The source was read and announces nothing."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The source announces these."""

    announcements: tuple[Announcement, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The source, or a part of it, could not be read; `reason` says why. `announcements`: what could still be read."""

    reason: str
    announcements: tuple[Announcement, ...] = ()


Observation = Nothing | Announced | Unknown


@dataclass(frozen=True, slots=True)
class MachineName:
    """What the provider calls this machine, and the zone that it is in."""

    provider_id: str
    zone: str


class NoticeSource(Protocol):
    """One way to learn of an interruption. `observe` may wait for the source's own timeout."""

    @property
    def name(self) -> str:
        """Short, stable, for facts and logs, for example `aws-imds`."""
        ...

    @property
    def interval_s(self) -> float:
        """Least time between the starts of two observations."""
        ...

    async def observe(self) -> Observation:
        """Read the source once. A network error becomes `Unknown`, never an exception."""
        ...

    async def machine(self) -> MachineName | None:
        """Which machine this is; None for a source that names none. Raises Unreadable."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class NoneSource:
    """For machines that no cloud takes back: always readable, never announces anything."""

    name = "none"
    interval_s = 60.0

    async def observe(self) -> Observation:
        """Nothing, always."""
        return Nothing()

    async def machine(self) -> MachineName | None:
        """No provider, no name."""
        return None

    async def close(self) -> None:
        """Nothing to release."""


def parse_utc(text: str) -> datetime | None:
    """RFC 3339 text as an aware time; None for anything else, also for a time without a zone or of another century."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return moment if _EARLIEST < moment < _LATEST else None
    except (ValueError, TypeError, OverflowError):
        return None
