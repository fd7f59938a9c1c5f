"""The reconciler of planned work: what a channel announced long ahead takes its node once it is near.

An agent finds that out itself where it reads its machine's metadata; a message of an account comes once, long before.
"""

from service.clouds.operations import begin_planned
from service.context import Context


def tick(context: Context) -> int:
    """Look once. Returns of how many nodes the work is near now."""
    with context.sessions.begin() as session:
        return begin_planned(session, now=context.clock())
