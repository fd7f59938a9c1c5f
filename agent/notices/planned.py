"""What metadata say of work on a machine that is planned, and of a group that lets it go, as announcements. Pure.

Work that is days away is advice: a machine that was paid for is not given up a week early. From `LEAD` before it begins
it is maintenance, which takes the node.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from agent.notices.metadata_read import Unreadable
from agent.notices.source import RAW_CHARS_MAX, Announcement, parse_utc
from agent.protocol.notice_life import LEAD, event_id_of
from agent.protocol.sync import NoticeKind
from agent.protocol.values import shifted

EVENTS_MAX = 100
AWS_CODES = ("instance-reboot", "system-reboot", "system-maintenance", "instance-retirement", "instance-stop")
"""EC2 User Guide, scheduled events for your instances. Each of them ends the processes on the machine."""
AWS_OVER = ("completed", "canceled")
GROUP_TAKES = ("Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated")
GROUP_LEAVES = ("InService", "Detached", "Standby", "Warmed:Running")
"""EC2 Auto Scaling User Guide, target lifecycle state. A detached or standby machine stays as it is."""
GCP_NO_NEWS = "no notifications have been received"
GCP_STATUSES = ("PENDING", "ONGOING")
GCP_WINDOW = "upcoming-maintenance"
"""The key names one window at a time, without an id. What it says later of that is about the same one."""


def merged(announcements: Iterable[Announcement]) -> tuple[Announcement, ...]:
    """At most one of each kind and planned event, as a source has: with the nearest deadline, and the texts of all."""
    found: dict[tuple[NoticeKind, str], Announcement] = {}
    for item in sorted(announcements, key=_by_deadline):
        first = found.setdefault((item.kind, item.event_id), item)
        if first is not item:
            found[item.kind, item.event_id] = replace(first, raw=_cut(f"{first.raw}; {item.raw}"))
    return tuple(found.values())


def raw_of(path: str, body: str) -> str:
    """The announcement as received, for people."""
    return _cut(f"{path}: {body}")


def aws_events(
    path: str,
    body: str,
    now: datetime,
    ahead: timedelta,
    unread: Callable[[str], object] = lambda reason: None,
) -> tuple[Announcement, ...]:
    """The scheduled events of an EC2 instance that are not over. `ahead`: of this node's clock. `unread` is told why an
    event cannot be read; it hides no other one. Raises Unreadable where the body is no list of events."""
    events = parse_json(path, body)
    if not isinstance(events, list) or len(events) > EVENTS_MAX:
        raise Unreadable(f"{path} is not a JSON list of at most {EVENTS_MAX}: {body[:80]!r}")
    found = []
    for event in events:
        try:
            found.append(_aws_event(path, event, now, ahead))
        except Unreadable as error:
            unread(str(error))
    return tuple(item for item in found if item is not None)


def _aws_event(path: str, event: object, now: datetime, ahead: timedelta) -> Announcement | None:
    """None for one that is over."""
    if not isinstance(event, dict):
        raise Unreadable(f"{path}: an event is not a JSON object: {event!r:.80}")
    if str(event.get("State")).lower() in AWS_OVER:
        return None
    if event.get("Code") not in AWS_CODES:
        raise Unreadable(f"{path}: Code must be one of {', '.join(AWS_CODES)}, is {event.get('Code')!r:.80}")
    starts = _http_date(event.get("NotBefore"))
    if starts is None:
        raise Unreadable(f"{path}: NotBefore must be a date such as 21 Jan 2019 09:00:43 GMT, is "
                         f"{event.get('NotBefore')!r:.80}")  # fmt: skip
    event_id = event_id_of(event.get("EventId"))
    return _planned(shifted(starts, ahead) or starts, now, raw_of(path, json.dumps(event)), event_id)


def aws_group_state(path: str, body: str) -> Announcement | None:
    """That an Auto Scaling group is about to end or stop the instance. When, it does not say. Raises Unreadable."""
    state = body.strip()
    if state in GROUP_TAKES:
        return Announcement(NoticeKind.INTERRUPTION, None, raw_of(path, state))
    if state not in GROUP_LEAVES:
        raise Unreadable(f"{path} must be one of {', '.join(GROUP_LEAVES + GROUP_TAKES)}, is {state[:80]!r}")
    return None


def gcp_event(path: str, body: str, deadline_utc: datetime) -> Announcement | None:
    """The key `maintenance-event`. `deadline_utc`: an estimate, since the key contains no time. Raises Unreadable."""
    match body.strip():
        case "NONE":
            return None
        case "MIGRATE_ON_HOST_MAINTENANCE" as value:
            # The machine is paused for a moment and goes on elsewhere.
            return Announcement(NoticeKind.REBALANCE, None, raw_of(path, value))
        case "TERMINATE_ON_HOST_MAINTENANCE" as value:
            return Announcement(NoticeKind.MAINTENANCE, deadline_utc, raw_of(path, value), is_estimate=True)
        case value:
            raise Unreadable(f"{path} is no maintenance event: {value[:80]!r}")


def gcp_upcoming(path: str, body: str, now: datetime) -> Announcement | None:
    """The key `upcoming-maintenance`, as JSON. Field names are taken in both spellings, `windowStartTime` and
    `window_start_time`: documents show both. Raises Unreadable."""
    found = parse_json(path, body)
    if not isinstance(found, dict):
        raise Unreadable(f"{path} is not a JSON object: {body[:80]!r}")
    if GCP_NO_NEWS in str(found.get("error", "")):
        return None
    fields = {str(name).replace("_", "").lower(): value for name, value in found.items()}
    status, starts = fields.get("maintenancestatus"), fields.get("windowstarttime")
    moment = parse_utc(starts) if isinstance(starts, str) else None
    if status not in GCP_STATUSES or moment is None:
        raise Unreadable(f"{path}: maintenanceStatus must be {' or '.join(GCP_STATUSES)} and windowStartTime RFC 3339, "
                         f"are {status!r:.40} and {starts!r:.40}")  # fmt: skip
    if status == "ONGOING":
        return _planned(min(moment, now), now, raw_of(path, body))
    return _planned(moment, now, raw_of(path, body), GCP_WINDOW)


def parse_json(path: str, body: str) -> object:
    """Raises Unreadable."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Unreadable(f"{path} is not JSON: {body[:80]!r}") from None


def _planned(starts_utc: datetime, now: datetime, raw: str, event_id: str = "") -> Announcement:
    kind = NoticeKind.MAINTENANCE if starts_utc - now <= LEAD else NoticeKind.REBALANCE
    return Announcement(kind, starts_utc, raw, event_id=event_id)


def _by_deadline(item: Announcement) -> tuple[bool, datetime]:
    return item.deadline_utc is None, item.deadline_utc or datetime.min.replace(tzinfo=UTC)


def _http_date(text: object) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text) if isinstance(text, str) else None
        return None if moment is None else parse_utc(moment.isoformat())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _cut(text: str) -> str:
    return text[:RAW_CHARS_MAX]
