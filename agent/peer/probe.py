"""Whether a machine answers on an agent's port, without asking the agent: one connection, which the kernel accepts.

An agent that is stopped or starved still has a kernel that accepts. A machine that is gone or cut off has not.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from urllib.parse import urlsplit

TIMEOUT_S = 1.0
PERIOD_S = 2.0
FRESH_S = 5.0


class Reached(StrEnum):
    """What became of the connection."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    NONE = "none"


async def answer_of(url: str, timeout_s: float = TIMEOUT_S) -> Reached:
    """Connect to host and port of the URL once, and close."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except ConnectionRefusedError:
        return Reached.REFUSED
    except OSError:  # TimeoutError is one.
        return Reached.NONE
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Reached.ACCEPTED


async def is_reached(url: str) -> bool:
    """Whether the machine answers at all, if only to refuse."""
    return await answer_of(url) is not Reached.NONE


class Probes:
    """The nodes that the service asks about, which it does not hear itself. Probed again every PERIOD_S."""

    def __init__(self) -> None:
        self._answered_at: dict[str, float] = {}
        self._next_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def tick(self, asked: Iterable[str], urls: Mapping[str, str]) -> None:
        """Begin the next round if it is due. Never waits."""
        now = time.monotonic()
        wanted = {name: urls[name] for name in asked if name in urls}
        self._answered_at = {name: at for name, at in self._answered_at.items() if name in wanted}
        if wanted and now >= self._next_at and (self._task is None or self._task.done()):
            self._next_at = now + PERIOD_S
            self._task = asyncio.create_task(self._round(wanted))

    def answering(self) -> tuple[str, ...]:
        """Those whose machine answered within the last FRESH_S, in order of name."""
        since = time.monotonic() - FRESH_S
        return tuple(sorted(name for name, at in self._answered_at.items() if at >= since))

    async def close(self) -> None:
        """End a round in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _round(self, urls: Mapping[str, str]) -> None:
        found = await asyncio.gather(*(answer_of(url) for url in urls.values()))
        now = time.monotonic()
        self._answered_at |= {name: now for name, answer in zip(urls, found, strict=True) if answer is Reached.ACCEPTED}
