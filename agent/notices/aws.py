"""AWS instance metadata, version 2 (IMDSv2): a session token, then polling of every key that can announce an end.

The timing follows AWS's own handler: token for 3600 s, renewed below 15 s, dropped on 401, 2 s timeout. But it polls
every second, not every two: what is heard late is lost to a short notice.
A 404 means no notice; a 5xx, a refused token, a timeout or unreadable JSON is `Unknown` with its reason, never "no
notice". What can be read counts all the same.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx

from agent.notices.metadata_read import Answer, Unreadable, read
from agent.notices.planned import aws_events, aws_group_state, merged, parse_json, raw_of
from agent.notices.source import Announced, Announcement, MachineName, Nothing, Observation, Unknown, parse_utc
from agent.protocol.sync import NoticeKind
from agent.protocol.values import shifted

DEFAULT_URL = "http://169.254.169.254"
TOKEN_TTL_S = 3_600
TOKEN_RENEW_BELOW_S = 15.0
TIMEOUT_S = 2.0
OBSERVATION_TIMEOUTS = 3.0
"""How many timeouts one observation may take in all, however many keys there are: one that hangs is to be noticed."""
INTERVAL_S = 1.0
CLOCKS_APART = timedelta(seconds=5)
"""A node's clock that differs by more from that of its metadata service is wrong."""
TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
TERMINATION_PATH = "/latest/meta-data/spot/termination-time"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
GROUP_PATH = "/latest/meta-data/autoscaling/target-lifecycle-state"
INSTANCE_PATH = "/latest/meta-data/instance-id"
ZONE_PATH = "/latest/meta-data/placement/availability-zone"
EVENTS_PATH = "/latest/meta-data/events/maintenance/scheduled"
ACTIONS = ("terminate", "stop", "hibernate")


class AwsImdsSource:
    """`monotonic` and `now` are arguments, so that token renewal is tested without waiting."""

    name = "aws-imds"

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self.interval_s = interval_s
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._now = now
        # No proxy from the environment: metadata is link-local.
        self._client = httpx.AsyncClient(timeout=timeout_s, trust_env=False)
        self._ahead = timedelta(0)
        self._token: tuple[str, float] | None = None  # and until when it can be used
        self._observes_until = 0.0

    async def observe(self) -> Observation:
        """Read all keys once, the most urgent first. What is announced is returned also where another key, or another
        event of the same key, cannot be read."""
        self._observes_until = self._monotonic() + OBSERVATION_TIMEOUTS * self._timeout_s
        announcements: list[Announcement] = []
        problems: list[str] = []
        for read_key in (self._read_interruption, self._read_group, self._read_rebalance, self._read_events):
            try:
                announcements += await read_key()
            except Unreadable as error:
                announcements += error.found
                problems.append(str(error))
        found = merged(announcements)
        if problems:
            return Unknown("; ".join(dict.fromkeys(problems)), found)
        return Announced(found) if found else Nothing()

    async def machine(self) -> MachineName | None:
        """Instance id and availability zone."""
        self._observes_until = self._monotonic() + OBSERVATION_TIMEOUTS * self._timeout_s
        found = []
        for path in (INSTANCE_PATH, ZONE_PATH):
            body = await self._get(path)
            if not body:
                raise Unreadable(f"{path} is not there")
            found.append(body.strip())
        return MachineName(*found)

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.aclose()

    async def _read_interruption(self) -> tuple[Announcement, ...]:
        """Read the action key; if it is absent or unreadable, the older termination key. Where nothing is planned that
        one is absent, or holds what is no time (EC2 User Guide)."""
        unreadable: Unreadable | None = None
        try:
            body = await self._get(ACTION_PATH)
            if body is not None:
                return (_parse_action(body, self._now(), self._ahead),)
        except Unreadable as error:
            unreadable = error
        body = await self._get(TERMINATION_PATH)
        moment = None if body is None else parse_utc(body)
        if moment is not None:
            moment = shifted(moment, self._ahead)
            return (Announcement(NoticeKind.INTERRUPTION, moment, raw_of(TERMINATION_PATH, body or "")),)
        if unreadable is not None:
            raise unreadable
        return ()

    async def _read_group(self) -> tuple[Announcement, ...]:
        body = await self._get(GROUP_PATH)
        found = None if body is None else aws_group_state(GROUP_PATH, body)
        return () if found is None else (found,)

    async def _read_events(self) -> tuple[Announcement, ...]:
        body = await self._get(EVENTS_PATH)
        problems: list[str] = []
        found = () if body is None else aws_events(EVENTS_PATH, body, self._now(), self._ahead, problems.append)
        if problems:
            raise Unreadable("; ".join(dict.fromkeys(problems)), found)
        return found

    async def _read_rebalance(self) -> tuple[Announcement, ...]:
        body = await self._get(REBALANCE_PATH)
        if body is None:
            return ()
        data = _parse_object(REBALANCE_PATH, body)
        if not isinstance(data.get("noticeTime"), str):
            raise Unreadable(f"{REBALANCE_PATH}: noticeTime is missing in {body[:80]!r}")
        return (Announcement(NoticeKind.REBALANCE, None, raw_of(REBALANCE_PATH, body)),)

    async def _get(self, path: str) -> str | None:
        """The body, or None for 404. A 401 drops the token; after the first one the key is read again with another."""
        answer = await self._send_with_token(path)
        if answer.status == 401:
            answer = await self._send_with_token(path)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise Unreadable(f"{path} answered {answer.status}")
        return answer.text

    async def _send_with_token(self, path: str) -> Answer:
        answer = await self._send("GET", path, {"X-aws-ec2-metadata-token": await self._fresh_token()})
        if answer.status == 401:
            self._token = None
        return answer

    async def _fresh_token(self) -> str:
        now = self._monotonic()
        if self._token is not None and self._token[1] - now >= TOKEN_RENEW_BELOW_S:
            return self._token[0]
        response = await self._send("PUT", TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)})
        if response.status != 200 or not response.text:
            raise Unreadable(f"PUT {TOKEN_PATH} answered {response.status}")
        if not response.text.isascii() or not response.text.isprintable():
            raise Unreadable(f"PUT {TOKEN_PATH} answered what is no token: {response.text[:80]!r}")
        ttl_s = response.headers.get("X-aws-ec2-metadata-token-ttl-seconds", str(TOKEN_TTL_S))
        self._token = response.text, now + (float(ttl_s) if ttl_s.isdigit() else TOKEN_TTL_S)
        return response.text

    async def _send(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        left_s = self._observes_until - self._monotonic()
        if left_s <= 0:
            raise Unreadable("the other keys were not read: those before them took too long")
        limit_s = min(self._timeout_s, left_s)
        answer = await read(self._client, method, self._url + path, limit_s=limit_s, headers=headers)
        self._ahead = _ahead_of(answer.headers.get("Date", ""), self._now())
        return answer


def _ahead_of(date: str, now: datetime) -> timedelta:
    """How far this node's clock is ahead of the one by which AWS names its times: nothing where they are about the
    same, or the answer does not say."""
    try:
        apart = now - parsedate_to_datetime(date)
    except (ValueError, TypeError):
        return timedelta(0)
    return apart if abs(apart) > CLOCKS_APART else timedelta(0)


def _parse_action(body: str, now: datetime, ahead: timedelta) -> Announcement:
    data = _parse_object(ACTION_PATH, body)
    action, time = data.get("action"), data.get("time")
    if action not in ACTIONS:
        raise Unreadable(f"{ACTION_PATH}: action must be one of {', '.join(ACTIONS)}, is {action!r}")
    moment = parse_utc(time) if isinstance(time, str) else None
    if action == "hibernate":
        # EC2 starts hibernating at once, whatever `time` is (EC2 User Guide).
        return Announcement(NoticeKind.INTERRUPTION, now.astimezone(UTC), raw_of(ACTION_PATH, body))
    if moment is None:
        raise Unreadable(f"{ACTION_PATH}: time must be RFC 3339, is {time!r}")
    return Announcement(NoticeKind.INTERRUPTION, shifted(moment, ahead), raw_of(ACTION_PATH, body))


def _parse_object(path: str, body: str) -> dict[str, object]:
    data = parse_json(path, body)
    if not isinstance(data, dict):
        raise Unreadable(f"{path} is not a JSON object: {body[:80]!r}")
    return data
