"""Numbers of generations: used once, by service or agents, though these may not hear each other. Pure.

A number is a start of the job and a place within it: 200003 is the third world of the job's second restart. Only the
service takes the first place of a start, when it starts a world from nothing or from a checkpoint; each start is used
once. A handoff takes the number after the highest one that its proposer has heard of, so never a first place. A later
start is greater than every handoff before it, and fences it.
"""

PLACES = 100_000


def start_of(generation: int) -> int:
    """The start that this generation belongs to; 0 is the first."""
    return generation // PLACES


def next_start(highest: int) -> int:
    """The number of a world that the service starts. `highest`: the greatest number it knows as used; 0: none is."""
    return 1 if highest == 0 else (start_of(highest) + 1) * PLACES + 1


def next_handoff(highest: int) -> int | None:
    """The number of a world that a handoff makes, or None if its start has no number left."""
    following = highest + 1
    return following if start_of(following) == start_of(highest) else None
