"""Who is told what waits for the service, so that it is not lost with the node that has it. Pure."""

from liver_core.layout import Roster

PEERS = 2
"""So many others hold what waits."""
PATIENCE_S = 3.0
"""A service that is there has taken a fact by then."""


def concerns(name: str, source: Roster | None, target: Roster) -> bool:
    """Whether this node is told of a handoff between these worlds: the service takes it from nodes of both only."""
    return name in target.node_ids() or (source is not None and name in source.node_ids())


def is_news(new: tuple[int, int], known: tuple[int, int] | None) -> bool:
    """Whether a copy of a handoff takes the place of the one that is known, by generation and `mirror_seq` of both. Two
    agents may open one proposal, one after the other: the later has the higher generation, and counts from 0 again."""
    return known is None or new > known
