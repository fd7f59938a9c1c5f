"""Numbers of generations: used once, by service or agents, though these may not hear each other. Pure.

A number is a start of the job and a place within it: 200003 is the third world of the job's second restart. Only the
service takes the first place of a start, when it starts a world from nothing or from a checkpoint; each start is used
once. A handoff takes a number after the highest one that its proposer has heard of, so never a first place. A later
start is greater than every handoff before it, and fences it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from liver_core.layout import Member

PLACES = 100_000
STARTS_AHEAD_MAX = 10_000
"""A service that was restored from a backup may have forgotten so many starts of a job: a week of one a minute."""


def start_of(generation: int) -> int:
    """The start that this generation belongs to; 0 is the first."""
    return generation // PLACES


def first_of(generation: int) -> int:
    """The number of the world with which the start of this generation began."""
    return start_of(generation) * PLACES + 1


def next_start(highest: int) -> int:
    """The number of a world that the service starts. `highest`: the greatest number it knows as used; 0: none is."""
    return 1 if highest == 0 else first_of(highest + PLACES)


def last_after(generation: int) -> int:
    """The greatest number of a start that can have come after the one of `generation`, though its service does not know
    of it. A greater one is made up."""
    return first_of(generation + STARTS_AHEAD_MAX * PLACES)


def may_replace(newer: int, generation: int) -> bool:
    """Whether `newer` can be the number of a start that came after the one of `generation`."""
    return newer == first_of(newer) and start_of(generation) < start_of(newer) and newer <= last_after(generation)


def replacing(starts: Iterable[int], generation: int) -> list[int]:
    """Those of these starts that came after the one of `generation`. A number that no start can have by now does not
    count: whoever may write in a folder of checkpoints can name a file so."""
    return [start for start in starts if may_replace(start, generation)]


def next_handoff(highest: int, parent: int) -> int | None:
    """The number of a world that a handoff from `parent` makes. None if its start has no number left, or if a newer one
    has been heard of: `parent` is about to end, and the number after `highest` may be that of the newer world."""
    following = max(highest, parent) + 1
    return following if start_of(following) == start_of(parent) else None


def next_number(highest: int, parent: int, *, place: int = 0) -> int | str:
    """The number of a world that a handoff from `parent` makes, or why there is none. `highest`: the greatest known as
    used. `place`: of the node that leads among those that may. The numbers before are left to the others, since several
    may open one at a time."""
    used = max(highest, parent)
    if start_of(used) > start_of(parent):
        return f"no handoff of generation {parent}: the service has started generation {used}"
    number = next_handoff(used + place, parent)
    return number or f"no handoff of generation {parent}: its start has no number left"


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


@dataclass(frozen=True, slots=True)
class StartWait:
    """What a start waits for. `leased`: nodes that are not heard, and may hold step leases: it does not begin before
    they are over. `steps_after_s`: how long its ranks wait, from its beginning on, before their first step, because an
    older world is heard. That one learns of the start at once, but may be cut off just before. Or because the ranks of
    the start before had to wait, and would still do so."""

    leased: tuple[str, ...]
    steps_after_s: float


def start_wait(
    worlds: Collection[Collection[Member]],
    *,
    target: Collection[Member],
    lost_sight_of: Iterable[tuple[str, float]],
    lease_s: float,
    waits_s: float = 0.0,
) -> StartWait:
    """What a start on `target` waits for; `worlds` as for `unfenced`. `lost_sight_of`: nodes that are not heard, each
    with the seconds since it last was; `lease_s`: what an answer of the service is worth. `waits_s`: how long the ranks
    of the start that this one replaces would still wait; of the worlds that they wait for `worlds` need not tell."""
    unheard = dict(lost_sight_of)
    leased = [name for name, ago_s in unheard.items() if ago_s < lease_s]
    heard = {member.node_id for world in worlds for member in world} - set(unheard)
    is_heard = bool(unfenced(worlds, target=target, leased=heard))
    return StartWait(unfenced(worlds, target=target, leased=leased), max(waits_s, lease_s if is_heard else 0.0))
