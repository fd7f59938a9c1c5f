"""GCP metadata server: a long poll of `instance/preempted`, resumed by its ETag, and then the keys of maintenance.

Some servers answer a long poll at once, so the watcher starts at most one call per second. The first call sends a stale
ETag and returns at once, so a change before the agent's start is not missed. No key but `upcoming-maintenance` names a
time: a deadline is counted from the last moment at which the key still said nothing, which is the earliest that the
cloud can have said it.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

import httpx

from agent.notices.metadata_read import Answer, Unreadable, read
from agent.notices.planned import gcp_event, gcp_upcoming, merged, raw_of
from agent.notices.source import Announced, Announcement, MachineName, Nothing, Observation, Unknown
from agent.notices.warning_budget import WarningBudget
from agent.protocol.sync import NoticeKind

DEFAULT_URL = "http://169.254.169.254"
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
EVENT_PATH = "/computeMetadata/v1/instance/maintenance-event"
UPCOMING_PATH = "/computeMetadata/v1/instance/upcoming-maintenance"
ID_PATH = "/computeMetadata/v1/instance/id"
ZONE_PATH = "/computeMetadata/v1/instance/zone"
LONG_POLL_S = 5
"""Well below the 30 s of a notice. A poll that hangs hears nothing until it ends, and a deadline is counted from the
end of the poll before: a longer one would take more from the time that is left."""
GRACE_S = 2.0
READ_S = 2.0
EVENT_S, EVENT_WITH_GPU_S = 60.0, 3_600.0
"""Time from `maintenance-event` to its end, without and with a GPU (Compute Engine, host maintenance notices)."""
STALE_ETAG = "NONE"
FLAVOR = {"Metadata-Flavor": "Google"}


class GcpMetadataSource:
    """`budget` gives the time from a preemption notice to its deadline, `event_s` that of `maintenance-event`."""

    name = "gcp-metadata"
    interval_s = 1.0

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        budget: WarningBudget,
        event_s: float = EVENT_S,
        long_poll_s: float = LONG_POLL_S,
        now: Callable[[], datetime],
    ) -> None:
        self._url = url.rstrip("/")
        self._budget = budget
        self._event_s = event_s
        self._long_poll_s = long_poll_s
        self._now = now
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(2.0, read=long_poll_s + GRACE_S), trust_env=False)
        self._etag = STALE_ETAG
        self._preempted = _Told(now())
        self._event = _Told(now())
        self._maintenance: tuple[Announcement, ...] = ()

    async def observe(self) -> Observation:
        """Wait for a preemption, at most for the long poll's timeout; then read what is said of maintenance."""
        problems: list[str] = []
        try:
            interruption = await self._read_preempted()
            if interruption is not None:
                # It waits for no other key. What those said last still holds.
                return Announced(merged((interruption, *self._maintenance)))
        except Unreadable as error:
            # The call after a failure must return at once: the value may have changed during the failure.
            self._etag = STALE_ETAG
            problems.append(str(error))
        found: list[Announcement] = []
        reads = await asyncio.gather(self._read_event(), self._read_upcoming(), return_exceptions=True)
        for result in reads:
            if isinstance(result, Unreadable):
                problems.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            elif result is not None:
                found.append(result)
        maintenance = merged(found)
        if problems:
            return Unknown("; ".join(dict.fromkeys(problems)), maintenance)
        self._maintenance = maintenance
        return Announced(maintenance) if maintenance else Nothing()

    async def machine(self) -> MachineName | None:
        """The number of the instance, which also a machine of the same name does not share, and its zone."""
        found = []
        for path in (ID_PATH, ZONE_PATH):
            answer = await self._get(path, {})
            if answer.status != 200 or not answer.text.strip():
                raise Unreadable(f"{path} answered {answer.status}")
            found.append(answer.text.strip().rpartition("/")[2])
        return MachineName(*found)

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.aclose()

    async def _read_preempted(self) -> Announcement | None:
        query = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": f"{self._long_poll_s:g}"}
        answer = await self._get(PREEMPTED_PATH, query, limit_s=self._long_poll_s + GRACE_S)
        value = answer.text.strip()
        if answer.status != 200:
            raise Unreadable(f"{PREEMPTED_PATH} answered {answer.status}")
        if value not in ("TRUE", "FALSE"):
            raise Unreadable(f"{PREEMPTED_PATH} must be TRUE or FALSE, is {value[:80]!r}")
        self._etag = answer.headers.get("ETag", STALE_ETAG)
        if value == "FALSE":
            self._preempted.take_nothing(self._now())
            return None
        deadline = self._preempted.deadline_utc(self._now(), self._budget.announced_s)
        return Announcement(NoticeKind.INTERRUPTION, deadline, raw_of(PREEMPTED_PATH, value), is_estimate=True)

    async def _read_event(self) -> Announcement | None:
        answer = await self._get(EVENT_PATH, {})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise Unreadable(f"{EVENT_PATH} answered {answer.status}")
        deadline = self._event.deadline_utc(self._now(), self._event_s)
        found = gcp_event(EVENT_PATH, answer.text, deadline)
        if found is None or not found.is_estimate:
            self._event.take_nothing(self._now())
        return found

    async def _read_upcoming(self) -> Announcement | None:
        answer = await self._get(UPCOMING_PATH, {"alt": "json"})
        if answer.status == 404 and not answer.text.lstrip().startswith("{"):
            return None
        try:
            return gcp_upcoming(UPCOMING_PATH, answer.text, self._now())
        except Unreadable:
            if answer.status != 200:
                raise Unreadable(f"{UPCOMING_PATH} answered {answer.status}") from None
            raise

    async def _get(self, path: str, query: Mapping[str, str], *, limit_s: float = READ_S) -> Answer:
        """An answer of a server that names itself as Google's: a captive portal or a proxy does not. Of any other
        nothing is believed, neither a notice nor that there is none."""
        answer = await read(self._client, "GET", self._url + path, limit_s=limit_s, headers=FLAVOR, params=query)
        if answer.headers.get("Metadata-Flavor") != FLAVOR["Metadata-Flavor"] and answer.status < 500:
            raise Unreadable(f"{path} was answered {answer.status} without the header Metadata-Flavor: Google")
        return answer


class _Told:
    """When a key that names no time can have been set at the earliest."""

    def __init__(self, now: datetime) -> None:
        # Before its start the agent did not listen, and an earlier one of it has kept what it heard.
        self._not_before = now
        self._deadline: datetime | None = None

    def take_nothing(self, now: datetime) -> None:
        """The key says nothing now."""
        self._not_before, self._deadline = now, None

    def deadline_utc(self, now: datetime, notice_s: float) -> datetime:
        """The deadline of what the key says now, the same for as long as it says so. Never before `now`: the machine
        is still there."""
        if self._deadline is None:
            self._deadline = max(now, self._not_before + timedelta(seconds=notice_s))
        return self._deadline
