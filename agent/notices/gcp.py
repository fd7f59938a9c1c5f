"""GCP metadata server: a long poll of `instance/preempted`, resumed by its ETag.

Some servers answer a long poll at once, so the watcher starts at most one call per second. The first call sends a stale
ETag and returns at once, so a change before the agent's start is not missed.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

import httpx

from agent.notices.metadata_read import Unreadable, read
from agent.notices.source import RAW_CHARS_MAX, Announced, Announcement, Nothing, Observation, Unknown
from agent.notices.warning_budget import WarningBudget
from agent.protocol.sync import NoticeKind

DEFAULT_URL = "http://169.254.169.254"
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
LONG_POLL_S = 10
"""Well below the 30 s of a notice: a poll that hangs hears nothing until it ends."""
GRACE_S = 2.0
STALE_ETAG = "NONE"
FLAVOR = {"Metadata-Flavor": "Google"}


class GcpMetadataSource:
    """`budget` gives the deadline, because the key contains none."""

    name = "gcp-metadata"
    interval_s = 1.0

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        budget: WarningBudget,
        long_poll_s: float = LONG_POLL_S,
        now: Callable[[], datetime],
    ) -> None:
        self._url = url.rstrip("/")
        self._budget = budget
        self._long_poll_s = long_poll_s
        self._now = now
        self._limit_s = long_poll_s + GRACE_S
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(2.0, read=self._limit_s), trust_env=False)
        self._etag = STALE_ETAG
        self._deadline: datetime | None = None

    async def observe(self) -> Observation:
        """Wait for a change, at most for the long poll's timeout."""
        try:
            value = await self._read()
        except Unreadable as error:
            # The call after a failure must return at once: the value may have changed during the failure.
            self._etag = STALE_ETAG
            return Unknown(str(error))
        if value == "FALSE":
            self._deadline = None
            return Nothing()
        if self._deadline is None:
            self._deadline = self._now() + timedelta(seconds=self._budget.announced_s)
        raw = f"{PREEMPTED_PATH}: {value}"[:RAW_CHARS_MAX]
        return Announced((Announcement(NoticeKind.INTERRUPTION, self._deadline, raw, is_estimate=True),))

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.aclose()

    async def _read(self) -> str:
        """TRUE or FALSE, from a server that names itself as Google's: a captive portal or a proxy does not."""
        query = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": f"{self._long_poll_s:g}"}
        url = self._url + PREEMPTED_PATH
        answer = await read(self._client, "GET", url, limit_s=self._limit_s, headers=FLAVOR, params=query)
        if answer.status != 200:
            raise Unreadable(f"{PREEMPTED_PATH} answered {answer.status}")
        if answer.headers.get("Metadata-Flavor") != FLAVOR["Metadata-Flavor"]:
            raise Unreadable(f"{PREEMPTED_PATH} was answered without the header Metadata-Flavor: Google")
        value = answer.text.strip()
        if value not in ("TRUE", "FALSE"):
            raise Unreadable(f"{PREEMPTED_PATH} must be TRUE or FALSE, is {value[:80]!r}")
        self._etag = answer.headers.get("ETag", STALE_ETAG)
        return value
