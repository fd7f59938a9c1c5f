"""When a node that sends no reports counts as silent, then as gone, and which node gets no rank. Pure."""

from datetime import datetime, timedelta
from typing import Any

from agent.protocol.sync import NoticeKind
from service.nodes.tables import NodeState
from service.notices.rules import takes_node

ANSWER_FRESH_S = 6.0
"""A machine that answered another agent so recently is still there. Agents look every two seconds and report each
second."""
DEAF_MOST_S = 120.0
"""When all nodes fall silent together, this service is probably cut off. After so long they count as lost."""


def heard_until(newest_at: datetime | None, *, nodes: int, now: datetime, silent_after_s: float) -> datetime:
    """Until when this service heard anybody, by the newest report of any of `nodes`: now, unless all are silent.

    A job must not be suspended, with steps lost, because the service's own network fails. One node alone tells nothing.
    """
    if newest_at is None or nodes < 2 or (now - newest_at).total_seconds() > DEAF_MOST_S:
        return now
    return min(now, newest_at + timedelta(seconds=silent_after_s / 2))


def answers(answered_at: datetime | None, now: datetime) -> bool:
    """Whether the node's machine has just answered another agent."""
    return answered_at is not None and (now - answered_at).total_seconds() <= ANSWER_FRESH_S


def state_of(
    *, last_seen_at: datetime, listening_since: datetime, until: datetime, silent_after_s: float, gone_after_s: float
) -> NodeState:
    """The state of a node by the time between its last report and `until`, when the service last heard anybody.

    Time in which this service was not listening does not count: after an hour of downtime it must not mark every node
    gone before the nodes had time to report.
    """
    silence_s = (until - max(last_seen_at, listening_since)).total_seconds()
    if silence_s >= gone_after_s:
        return NodeState.GONE
    return NodeState.SILENT if silence_s >= silent_after_s else NodeState.READY


def announces_its_end(notice_source: dict[str, Any] | None) -> bool:
    """Whether the node's notice source announces that the node will go. It gets no rank then, also where the notice
    itself is over because its deadline is long past: what outlived one notice may be taken without another."""
    announced = (notice_source or {}).get("announces", ())
    return any(takes_node(NoticeKind(kind)) for kind in announced)
