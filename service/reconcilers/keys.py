"""The key reconciler: makes a new peer key for a job when a node that may know the present one has left it."""

from service.context import Context
from service.peer_keys.operations import follow_grants


def tick(context: Context) -> int:
    """Take the next step with the keys of each job. Returns how many changed."""
    with context.sessions.begin() as session:
        return follow_grants(session, now=context.clock())
