"""What a notice source is, and what one look at it can say: nothing, an announcement, or that it cannot be known.

Pure. A timeout or a server error is `Unknown`, never `Nothing`: a blind agent must not look like a safe one.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from agent.protocol.sync import NoticeKind

RAW_CHARS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Announcement:
    """One thing a source said. `deadline_utc` is None where the source names no time."""

    kind: NoticeKind
    deadline_utc: datetime | None
    raw: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """The source was reached and announces nothing."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The source announces these."""

    announcements: tuple[Announcement, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The source could not be read, so nobody knows; `reason` says why. `heard` is what could be read all the same."""

    reason: str
    heard: tuple[Announcement, ...] = ()


Observation = Nothing | Heard | Unknown


class NoticeSource(Protocol):
    """One way to hear of an interruption. `observe` may hang for as long as the source's own timeout."""

    @property
    def name(self) -> str:
        """Short, stable, for facts and logs, for example `aws-imds`."""
        ...

    @property
    def interval_s(self) -> float:
        """Least time between the starts of two observations."""
        ...

    async def observe(self) -> Observation:
        """One look. Never raises for what the network does."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class NoneSource:
    """For machines nobody takes back: always reached, never announces."""

    name = "none"
    interval_s = 60.0

    async def observe(self) -> Observation:
        """Nothing, always."""
        return Nothing()

    async def close(self) -> None:
        """Nothing to release."""


def parse_utc(text: str) -> datetime | None:
    """RFC 3339 text to an aware time; None if it is not one (a time without a zone is not)."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None
