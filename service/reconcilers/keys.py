"""The key reconciler: makes a new peer key for a job when a node that may know the present one has left it, and looks
up again, all together, the tokens of nodes that this service has verified.
"""

from service.context import Context
from service.peer_keys.operations import follow_grants
from service.tokens.operations import still_valid


def tick(context: Context) -> int:
    """Take the next step with the keys of each job. Returns how many changed."""
    _renew_tokens(context)
    with context.sessions.begin() as session:
        return follow_grants(session, now=context.clock())


def _renew_tokens(context: Context) -> None:
    now, seen = context.clock(), context.recent_nodes.times_forgotten
    due = context.recent_nodes.due(now=now)
    if due:
        with context.sessions() as session:
            valid = still_valid(session, due, now=now)
        context.recent_nodes.renew(valid, now=now, seen=seen)
