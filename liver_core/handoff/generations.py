"""Numbers of generations: used once, by service or agents, though these may not hear each other. Pure.

A number is a start of the job and a place within it: 200003 is the third world of the job's second restart. Only the
service takes the first place of a start, when it starts a world from nothing or from a checkpoint; each start is used
once. A handoff takes the number after the highest one that its proposer has heard of, so never a first place. A later
start is greater than every handoff before it, and fences it.
"""

from collections.abc import Collection, Iterable

from liver_core.layout import Member

PLACES = 100_000


def start_of(generation: int) -> int:
    """The start that this generation belongs to; 0 is the first."""
    return generation // PLACES


def first_of(generation: int) -> int:
    """The number of the world with which the start of this generation began."""
    return start_of(generation) * PLACES + 1


def next_start(highest: int) -> int:
    """The number of a world that the service starts. `highest`: the greatest number it knows as used; 0: none is."""
    return 1 if highest == 0 else first_of(highest + PLACES)


def next_handoff(highest: int, parent: int) -> int | None:
    """The number of a world that a handoff from `parent` makes. None if its start has no number left, or if a newer one
    has been heard of: `parent` is about to end, and the number after `highest` may be that of the newer world."""
    following = max(highest, parent) + 1
    return following if start_of(following) == start_of(parent) else None


def unfenced(
    worlds: Iterable[Collection[Member]], *, target: Collection[Member], leased: Collection[str]
) -> tuple[str, ...]:
    """Nodes whose step leases a start on `target` has to wait for, since a world that is older might still step.

    `worlds`: members of each older one of which no rank is known to have ended. It steps only while all of its ranks
    live and one of its nodes is `leased`. One of which a member is in `target` is not waited for: there its rank ends
    before the next one starts.
    """
    waits: dict[str, None] = {}
    for world in worlds:
        if not set(world) & set(target):
            waits |= dict.fromkeys(member.node_id for member in world if member.node_id in leased)
    return tuple(waits)
