"""One read of a metadata service, with a total limit in seconds and in bytes, whatever the server does."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from agent.notices.source import Announcement

BODY_BYTES_MAX = 64 * 1024
"""Far above what any of the keys holds."""


class Unreadable(Exception):
    """The text says what could not be read, and why. `found`: what the same answer announces where it can be read."""

    def __init__(self, reason: str, found: tuple[Announcement, ...] = ()) -> None:
        super().__init__(reason)
        self.found = found


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: httpx.Headers
    text: str


async def read(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    limit_s: float,
    headers: Mapping[str, str],
    params: Mapping[str, str] | None = None,
) -> Answer:
    """Send one request and read all of the answer, within `limit_s` in all. Raises Unreadable.

    A timeout of httpx limits each wait for the next bytes only, so a body that trickles would never end.
    """
    path = httpx.URL(url).path
    # Bytes are counted as they come, so none may be compressed.
    wanted = {"Accept-Encoding": "identity", **headers}
    try:
        async with asyncio.timeout(limit_s):
            async with client.stream(method, url, headers=wanted, params=params) as response:
                body = bytearray()
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > BODY_BYTES_MAX:
                        raise Unreadable(f"{method} {path} answered more than {BODY_BYTES_MAX} bytes")
                return Answer(response.status_code, response.headers, body.decode(errors="replace"))
    except (TimeoutError, httpx.TimeoutException):
        raise Unreadable(f"{method} {path} did not answer in {limit_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreadable(f"{method} {path} failed: {type(error).__name__}: {error}") from None
