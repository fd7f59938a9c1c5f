"""GCP metadata server: a long poll of `instance/preempted`, resumed by its ETag.

Some servers answer a long poll at once, so the watcher starts at most one call per second. The first call sends a stale
ETag and returns at once, so a change before the agent's start is not missed.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

import httpx

from agent.notices.source import RAW_CHARS_MAX, Announced, Announcement, Nothing, Observation, Unknown
from agent.notices.warning_budget import WarningBudget
from agent.protocol.sync import NoticeKind

DEFAULT_URL = "http://169.254.169.254"
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
LONG_POLL_S = 30
GRACE_S = 5.0
STALE_ETAG = "NONE"


class GcpMetadataSource:
    """`budget` gives the deadline, because the key contains none."""

    name = "gcp-metadata"
    interval_s = 1.0

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        budget: WarningBudget,
        long_poll_s: int = LONG_POLL_S,
        now: Callable[[], datetime],
    ) -> None:
        self._url = url.rstrip("/")
        self._budget = budget
        self._long_poll_s = long_poll_s
        self._now = now
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(2.0, read=long_poll_s + GRACE_S), trust_env=False)
        self._etag = STALE_ETAG
        self._deadline: datetime | None = None

    async def observe(self) -> Observation:
        """Wait for a change, at most for the long poll's timeout."""
        if self._deadline is not None:
            return self._announced("TRUE")
        query = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": str(self._long_poll_s)}
        try:
            response = await self._client.get(
                self._url + PREEMPTED_PATH, params=query, headers={"Metadata-Flavor": "Google"}
            )
        except httpx.TimeoutException:
            return self._unknown(f"{PREEMPTED_PATH} did not answer in {self._long_poll_s + GRACE_S:g} s")
        except httpx.HTTPError as error:
            return self._unknown(f"{PREEMPTED_PATH} failed: {type(error).__name__}: {error}")
        if response.status_code != 200:
            return self._unknown(f"{PREEMPTED_PATH} answered {response.status_code}")
        self._etag = response.headers.get("ETag", STALE_ETAG)
        value = response.text.strip()
        if value == "FALSE":
            return Nothing()
        if value != "TRUE":
            return self._unknown(f"{PREEMPTED_PATH} must be TRUE or FALSE, is {value[:80]!r}")
        self._deadline = self._now() + timedelta(seconds=self._budget.announced_s)
        return self._announced(value)

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.aclose()

    def _announced(self, value: str) -> Announced:
        raw = f"{PREEMPTED_PATH}: {value}"[:RAW_CHARS_MAX]
        return Announced((Announcement(NoticeKind.INTERRUPTION, self._deadline, raw),))

    def _unknown(self, reason: str) -> Unknown:
        # The call after a failure must return at once: the value may have changed during the failure.
        self._etag = STALE_ETAG
        return Unknown(reason)
