"""Who is told what waits for the service, so that it is not lost with the node that has it. Pure."""

from typing import Protocol

from liver_core.layout import Roster

PEERS = 2
"""So many others hold what waits."""
PATIENCE_S = 3.0
"""A service that is there has taken a fact by then."""


class Numbered(Protocol):
    """A copy of a handoff, as the agent that leads it tells it."""

    @property
    def generation(self) -> int: ...
    @property
    def mirror_seq(self) -> int: ...


def concerns(name: str, source: Roster | None, target: Roster) -> bool:
    """Whether this node is told of a handoff between these worlds: the service takes it from nodes of both only."""
    return name in target.node_ids() or (source is not None and name in source.node_ids())


def is_news(new: Numbered, known: Numbered) -> bool:
    """Whether a copy of a handoff takes the place of the one that is known. Two agents may open one proposal, one after
    the other: the later opening has the higher generation, and its copies are counted anew."""
    return (new.generation, new.mirror_seq) > (known.generation, known.mirror_seq)
