"""When a node that is not heard counts as silent, then gone. Pure."""

from datetime import datetime

from service.nodes.tables import NodeState


def state_of(
    *, last_seen_at: datetime, listening_since: datetime, now: datetime, silent_after_s: float, gone_after_s: float
) -> NodeState:
    """The state of a node by the time since its last report.

    Time in which this service was not listening does not count: a service that comes back after an hour must not
    declare every node gone before any of them had the chance to report.
    """
    unheard_s = (now - max(last_seen_at, listening_since)).total_seconds()
    if unheard_s >= gone_after_s:
        return NodeState.GONE
    return NodeState.SILENT if unheard_s >= silent_after_s else NodeState.READY
