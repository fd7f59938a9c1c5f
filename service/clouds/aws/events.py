"""What a message of an AWS account says: events of EventBridge as they lie in a queue, also behind SNS. Pure.

Formats: EC2 User Guide (spot interruption, rebalance, capacity blocks, interruptible reservations), Auto Scaling and
Health event references. Where the documents and what is seen differ, both spellings are read.
"""

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from agent.protocol.notice_life import event_id_of
from agent.protocol.sync import Provider
from agent.protocol.values import utc
from liver_core.layout.limits import UTC_LEAST, UTC_MOST
from service.clouds.cloud_facts import CloudFact, FactKind, Unread, json_of
from service.notices.rules import AWS_QUEUE

BODY_CHARS_MAX = 256 * 1024
SPOT_WARNING = timedelta(seconds=120)
"""An interruption warning carries no deadline: EC2 acts two minutes after it at best."""
BLOCK_ENDS_BEFORE, ULTRA_ENDS_BEFORE = timedelta(minutes=30), timedelta(minutes=60)
"""EC2 begins to terminate the machines of a capacity block so long before its end date; the latter in UltraServers."""
_SNS_DEPTH_MAX = 2
_INSTANCE = re.compile(r"^i-[A-Za-z0-9]{1,40}$")
_ULTRA = re.compile(r"^(p\d+e-|trn\d+u)")
"""Types of machines that are parts of an UltraServer, such as p6e-gb200.36xlarge and trn2u.48xlarge."""
_RESERVATION = re.compile(r"^cr-[A-Za-z0-9]{1,40}$")
_GOING = {"stopping": FactKind.GOING, "shutting-down": FactKind.GOING, "stopped": FactKind.GONE,
          "terminated": FactKind.GONE}  # fmt: skip
_EARLIEST, _LATEST = utc(UTC_LEAST), utc(UTC_MOST)


class UnreadEvent(Exception):
    """The message is none of those that are known, or lacks what it must have; the text says what."""


@dataclass(frozen=True, slots=True)
class Hook:
    """An Auto Scaling group waits with the end of a machine until it is told to go on, or its time is over."""

    group: str
    hook: str
    token: str
    provider_id: str


@dataclass(frozen=True, slots=True)
class ReservationEnd:
    """A capacity block ends at `ends_at`. Which machines are in it, EC2 has to be asked."""

    reservation_id: str
    ends_at: datetime
    fact: CloudFact

    def of_machine(self, provider_id: str, machine_type: str) -> CloudFact:
        """What that means for one machine of the block."""
        before = ULTRA_ENDS_BEFORE if _ULTRA.match(machine_type) else BLOCK_ENDS_BEFORE
        return replace(self.fact, provider_id=provider_id, deadline_at=self.ends_at - before)


@dataclass(frozen=True, slots=True)
class EventRead:
    """What one message says. `passed`: why it says nothing of a machine that goes; `unread`: why nobody can read it."""

    facts: tuple[CloudFact, ...] = ()
    hook: Hook | None = None
    reservation: ReservationEnd | None = None
    passed: str = ""
    unread: Unread | None = None


def read_message(body: str, message_id: str) -> EventRead:
    """What a message of the queue says. `message_id`: SQS's own, used where the event names none. Never raises."""
    try:
        return _read(body, message_id)
    except UnreadEvent as error:
        return EventRead(unread=Unread(AWS_QUEUE, message_id, str(error), body))
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        return EventRead(unread=Unread(AWS_QUEUE, message_id, f"cannot be read: {type(error).__name__}: {error}", body))


def _read(body: str, message_id: str) -> EventRead:
    if len(body) > BODY_CHARS_MAX:
        raise UnreadEvent(f"is longer than {BODY_CHARS_MAX} characters")
    event = _unwrapped(body)
    if str(event.get("Event", "")).endswith("TEST_NOTIFICATION"):
        return EventRead(passed="a test of an Auto Scaling hook")
    if "LifecycleTransition" in event:
        # The group sends to the queue itself, without EventBridge around it.
        event = {"detail-type": "EC2 Instance-terminate Lifecycle Action", "time": event.get("Time"),
                 "id": event.get("RequestId"), "detail": event}  # fmt: skip
    kind = event.get("detail-type", event.get("detail_type"))
    if not isinstance(kind, str):
        raise UnreadEvent("detail-type: is required")
    detail = event.get("detail")
    if not isinstance(detail, dict):
        raise UnreadEvent("detail: must be a mapping of fields")
    base = CloudFact(
        provider=Provider.AWS,
        provider_id="",
        kind=FactKind.INTERRUPTION,
        said_at=_time(event.get("time"), "time"),
        deadline_at=None,
        channel=AWS_QUEUE,
        message_id=_name_of(event, message_id),
        raw=body,
    )
    return _read_event(kind, event, detail, base)


def _read_event(kind: str, event: dict[str, Any], detail: dict[str, Any], base: CloudFact) -> EventRead:
    match kind:
        case "EC2 Spot Instance Interruption Warning":
            # A machine that hibernates begins to at once (EC2 User Guide).
            warning = timedelta(0) if detail.get("instance-action") == "hibernate" else SPOT_WARNING
            return _told(base, detail, deadline_at=base.said_at + warning)
        case "EC2 Instance Rebalance Recommendation":
            return _told(base, detail, kind=FactKind.REBALANCE)
        case "EC2 Instance State-change Notification":
            return _state_change(base, detail)
        case (
            "EC2 Interruptible Capacity Reservation Instance Interruption Warning"
            | "EC2 Capacity Reservation Instance Interruption Warning"
        ):
            ends = detail.get("instance-termination-time")
            deadline = base.said_at + SPOT_WARNING if ends is None else _time(ends, "instance-termination-time")
            return _told(base, detail, deadline_at=deadline)
        case "Capacity Block Reservation Expiration Warning":
            return _reservation(base, detail)
        case "EC2 Instance-terminate Lifecycle Action":
            return _hook(base, detail)
        case "AWS Health Event":
            return _health(base, event, detail)
        case "Capacity Block Reservation Delivered":
            return EventRead(passed="a capacity block was delivered")
        case "EC2 Instance-launch Lifecycle Action":
            return EventRead(passed="a hook of an Auto Scaling group for a launch")
    raise UnreadEvent(f"detail-type: {kind[:100]!r} is not one that is known here")


def _told(base: CloudFact, detail: dict[str, Any], **more: Any) -> EventRead:
    # Never from the ARN: where a region would be it has the zone, and in some partitions more parts.
    return EventRead(facts=(replace(base, provider_id=_machine(detail.get("instance-id"), "instance-id"), **more),))


def _state_change(base: CloudFact, detail: dict[str, Any]) -> EventRead:
    machine, state = _machine(detail.get("instance-id"), "instance-id"), detail.get("state")
    if state in ("pending", "running"):
        return EventRead(passed=f"a machine is {state}")
    if not isinstance(state, str) or state not in _GOING:
        raise UnreadEvent(f"detail.state: {str(state)[:40]!r} is not one that is known here")
    kind = _GOING[state]
    deadline_at = base.said_at if kind is FactKind.GOING else None
    # One event for each state: both may have come of one change.
    return EventRead(facts=(replace(base, provider_id=machine, kind=kind, deadline_at=deadline_at),))


def _reservation(base: CloudFact, detail: dict[str, Any]) -> EventRead:
    name = detail.get("capacity-reservation-id")
    if not isinstance(name, str) or not _RESERVATION.match(name):
        raise UnreadEvent("detail.capacity-reservation-id: must be the id of a reservation, such as cr-0123")
    ends_at = _time(detail.get("end-date"), "detail.end-date")
    return EventRead(reservation=ReservationEnd(name, ends_at, replace(base, kind=FactKind.MAINTENANCE, event_id=name)))


def _hook(base: CloudFact, detail: dict[str, Any]) -> EventRead:
    transition = detail.get("LifecycleTransition")
    if transition != "autoscaling:EC2_INSTANCE_TERMINATING":
        return EventRead(passed=f"a hook of an Auto Scaling group for {str(transition)[:60]}")
    names = [detail.get(name) for name in ("AutoScalingGroupName", "LifecycleHookName", "LifecycleActionToken")]
    if not all(isinstance(name, str) and 0 < len(name) <= 255 for name in names):
        raise UnreadEvent("detail: must name AutoScalingGroupName, LifecycleHookName and LifecycleActionToken")
    group, hook, token = map(str, names)
    machine = _machine(detail.get("EC2InstanceId"), "EC2InstanceId")
    return EventRead(facts=(replace(base, provider_id=machine),), hook=Hook(group, hook, token, machine))


def _health(base: CloudFact, event: dict[str, Any], detail: dict[str, Any]) -> EventRead:
    if detail.get("service") != "EC2" or detail.get("eventTypeCategory") != "scheduledChange":
        return EventRead(passed="an event of AWS Health that is no scheduled change of EC2")
    starts_at = _time(detail["startTime"], "detail.startTime") if detail.get("startTime") else None
    entities = detail.get("affectedEntities") or []
    names = [item.get("entityValue") for item in entities if isinstance(item, dict)] or _resources(event)
    machines = [name for name in dict.fromkeys(names) if isinstance(name, str) and _INSTANCE.match(name)]
    if not machines:
        return EventRead(passed="an event of AWS Health that names no machine")
    fact = replace(
        base,
        kind=FactKind.MAINTENANCE,
        deadline_at=starts_at,
        is_withdrawal=detail.get("statusCode") == "closed",
        event_id=event_id_of(detail.get("eventArn")),
    )
    return EventRead(facts=tuple(replace(fact, provider_id=name) for name in machines))


def _resources(event: dict[str, Any]) -> list[Any]:
    """A list, or, in some events, one string."""
    found = event.get("resources")
    return [found] if isinstance(found, str) else list(found or ())


def _unwrapped(body: str) -> dict[str, Any]:
    for _ in range(_SNS_DEPTH_MAX + 1):
        try:
            event = json_of(body)
        except ValueError as error:
            raise UnreadEvent(f"must be JSON: {error}") from None
        if not isinstance(event, dict):
            raise UnreadEvent("must be a mapping of fields")
        if event.get("Type") == "SubscriptionConfirmation":
            raise UnreadEvent("is a request of SNS to confirm a subscription: visit its SubscribeURL")
        if event.get("Type") != "Notification" or not isinstance(event.get("Message"), str):
            return event
        body = event["Message"]
    raise UnreadEvent("lies in too many envelopes of SNS")


def _name_of(event: dict[str, Any], message_id: str) -> str:
    for name in ("id", "customer_event_id"):
        if isinstance(event.get(name), str) and event[name]:
            return event[name]
    return message_id


def _machine(value: Any, field: str) -> str:
    if not isinstance(value, str) or not _INSTANCE.match(value):
        raise UnreadEvent(f"detail.{field}: must be the id of a machine, such as i-0123")
    return value


def _time(value: Any, field: str) -> datetime:
    found = None
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value.strip())
        except ValueError:
            try:
                found = parsedate_to_datetime(value)
            except ValueError:
                found = None
    if found is None or found.tzinfo is None or not _EARLIEST < found < _LATEST:
        raise UnreadEvent(f"{field}: must be a time with its zone, such as 2030-01-31T12:00:00Z")
    return found
