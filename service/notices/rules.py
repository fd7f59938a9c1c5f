"""When a notice counts. Pure.

A notice belongs to one lease of a node. It is open while the lease lasts and its deadline is not long past. A node that
still reports well after its deadline was not taken (both clouds cancel some), so it may be used again.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from agent.protocol.sync import NoticeKind

TAKES_THE_NODE = (NoticeKind.INTERRUPTION, NoticeKind.MAINTENANCE)
GRACE_AFTER_DEADLINE = timedelta(seconds=180)
WITHOUT_DEADLINE_LASTS = timedelta(seconds=600)


@dataclass(frozen=True, slots=True)
class Notice:
    """What the rules need of one notice."""

    node_id: str
    kind: NoticeKind
    deadline_at: datetime | None
    first_seen_at: datetime


def is_open(notice: Notice, *, now: datetime, lease_open: bool) -> bool:
    """Whether the notice still applies to the node."""
    if not lease_open:
        return False
    if notice.deadline_at is None:
        return now < notice.first_seen_at + WITHOUT_DEADLINE_LASTS
    return now < notice.deadline_at + GRACE_AFTER_DEADLINE


def takes_node(notice: Notice) -> bool:
    """Whether the notice announces a loss; the other kinds are advice."""
    return notice.kind in TAKES_THE_NODE


def earliest_deadline(notices: tuple[Notice, ...]) -> datetime | None:
    """The earliest deadline of the notices; None if no notice names one."""
    return min((notice.deadline_at for notice in notices if notice.deadline_at is not None), default=None)
