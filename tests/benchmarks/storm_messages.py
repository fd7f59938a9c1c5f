"""The messages of a storm: what EventBridge sends when a market takes many machines at a time. Pure.

A machine of ours that is taken gives five messages: rebalance advice, the interruption warning, an event of Health with
the same end, and two changes of its state. Beside them machines of others, repetitions, and what nobody can read.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

PARTS = ("rebalance", "warning", "health", "shutting-down", "terminated")
"""Of one machine, in the order in which they are said."""
ANNOUNCES = ("warning", "health", "shutting-down")
"""Each of these says that the machine will go; jobs leave it because of the first."""
END_S = 120
FOREIGN, REPEATED, MALFORMED = 0.25, 0.25, 0.01
"""Shares of all messages."""
_TORN = ("this is no event", "[]", '{"detail-type": "EC2 Spot Instance Interruption Warning", "detail": {}}',
         '{"detail-type": "Something new", "time": "2026-01-01T00:00:00Z", "detail": {}}')  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """One message, sent `at_s` after the beginning. `part`: one of PARTS; empty: nobody can read it. `event`: its id.
    `said_as`: the id of the event whose time it carries, its own or that of the one it repeats."""

    at_s: float
    part: str
    machine: str
    event: str
    said_as: str
    is_ours: bool
    is_repeated: bool = False


def machines_of(count: int) -> int:
    """How many machines of ours a storm of so many messages takes."""
    return _ours(count) // len(PARTS)


def storm(count: int, machines: Sequence[str], *, seconds: float, seed: int) -> list[Message]:
    """So many messages about these machines and those of others, in the order in which they are sent."""
    draw = random.Random(seed)
    assert len(machines) == machines_of(count)
    told = [item for name in machines for item in _of_machine(name, seconds, draw, is_ours=True)]
    # What is left over after whole machines is about machines of others too.
    strange = count - len(told) - int(count * REPEATED) - int(count * MALFORMED)
    others: list[Message] = []
    while len(others) < strange:
        others += _of_machine(f"i-{draw.getrandbits(64):x}", seconds, draw, is_ours=False)
    again = [_again(draw.choice(told), seconds, draw) for _ in range(int(count * REPEATED))]
    torn = [_torn(draw, seconds) for _ in range(int(count * MALFORMED))]
    return sorted([*told, *others[:strange], *again, *torn], key=lambda item: item.at_s)


def body_of(message: Message, at: datetime) -> str:
    """As it lies in the queue. `at`: when the event `said_as` was said."""
    if not message.part:
        return _TORN[int(message.event.replace("-", ""), 16) % len(_TORN)] + " " * (int(message.event[:2], 16) % 7)
    machine = {"instance-id": message.machine}
    match message.part:
        case "rebalance":
            return _event(message, at, "EC2 Instance Rebalance Recommendation", machine)
        case "warning":
            detail = machine | {"instance-action": "terminate"}
            return _event(message, at, "EC2 Spot Instance Interruption Warning", detail)
        case "health":
            starts_at = (at + timedelta(seconds=END_S)).strftime("%a, %d %b %Y %H:%M:%S GMT")
            detail = {
                "service": "EC2", "eventTypeCategory": "scheduledChange", "statusCode": "upcoming",
                "startTime": starts_at, "affectedEntities": [{"entityValue": message.machine}],
            }  # fmt: skip
            return _event(message, at, "AWS Health Event", detail, source="aws.health")
    return _event(message, at, "EC2 Instance State-change Notification", machine | {"state": message.part})


def _event(message: Message, at: datetime, kind: str, detail: dict[str, Any], *, source: str = "aws.ec2") -> str:
    said = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    event = {
        "version": "0", "id": message.event, "detail-type": kind, "source": source, "account": "123456789012",
        "time": said, "region": "us-east-1", "resources": [], "detail": detail,
    }  # fmt: skip
    return json.dumps(event)


def _of_machine(machine: str, seconds: float, draw: random.Random, *, is_ours: bool) -> list[Message]:
    moments = sorted(draw.uniform(0, seconds) for _ in PARTS)
    found = []
    for part, at_s in zip(PARTS, moments, strict=True):
        event = _id(draw)
        found.append(Message(at_s, part, machine, event, event, is_ours))
    return found


def _again(message: Message, seconds: float, draw: random.Random) -> Message:
    """The same event once more, or another one that says the same."""
    event = message.event if draw.random() < 0.5 else _id(draw)
    at_s = draw.uniform(message.at_s, seconds)
    return Message(at_s, message.part, message.machine, event, message.said_as, is_ours=True, is_repeated=True)


def _torn(draw: random.Random, seconds: float) -> Message:
    event = _id(draw)
    return Message(draw.uniform(0, seconds), "", "", event, event, is_ours=False)


def _ours(count: int) -> int:
    return count - int(count * FOREIGN) - int(count * REPEATED) - int(count * MALFORMED)


def _id(draw: random.Random) -> str:
    return str(UUID(int=draw.getrandbits(128), version=4))
