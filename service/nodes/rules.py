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
"""When all nodes fall silent together, or many, this service is probably cut off. After so long they count as lost."""
MANY_LEAST, MANY_SHARE, TOGETHER_S = 4, 0.5, 10.0
"""So many nodes, being such a share of those that were heard, that fall silent within this time of each other: this
service is probably cut off from them."""


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


def are_many(fallen: int, *, heard: int) -> bool:
    """Whether the nodes that have just fallen silent are so many, beside those still heard, that it is probably this
    service that is cut off from them."""
    return fallen >= MANY_LEAST and fallen >= MANY_SHARE * (fallen + heard)


def state_of(silence_s: float, *, silent_after_s: float, gone_after_s: float) -> NodeState:
    """The state of a node by how long it was not heard. Time in which this service did not listen is not part of that:
    after an hour of downtime it must not mark every node gone before the nodes had time to report."""
    if silence_s >= gone_after_s:
        return NodeState.GONE
    return NodeState.SILENT if silence_s >= silent_after_s else NodeState.READY


def announces_its_end(notice_source: dict[str, Any] | None) -> bool:
    """Whether the node's notice source announces that the node will go. It gets no rank then, also where no notice
    counts any more, as where none named a time."""
    return _takes_it(notice_source, "announces")


def has_outlived_its_end(notice_source: dict[str, Any] | None) -> bool:
    """Whether the node is still there long after the end that its notice source announces. It was not taken, and may be
    at any time: it gets ranks after all other nodes."""
    return _takes_it(notice_source, "overdue") and not announces_its_end(notice_source)


def _takes_it(notice_source: dict[str, Any] | None, named: str) -> bool:
    return any(takes_node(NoticeKind(kind)) for kind in (notice_source or {}).get(named, ()))
