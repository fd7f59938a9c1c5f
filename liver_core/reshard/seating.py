"""Which process gets which rank of a target layout, so that little has to move: greedy, per node first. Pure.

A rank's state is pictured as a rectangle: the depth of the model it holds (pipeline stage, and its ZeRO-1 part of the
stage) by the width (its TP part). What two ranks share is the area that their rectangles share. This is an estimate
(exact in the middle of even models), which is enough to choose a place; the plan is exact whatever the place.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from liver_core.layout import Manifest, Member, ParallelLayout, Roster, check_fits
from liver_core.reshard.plan_error import PlanError


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """A node and how many ranks it can hold: slots 0 to slots - 1."""

    node_id: str
    slots: int


def place(
    manifest: Manifest,
    source: Roster,
    nodes: Sequence[NodeSlots],
    target_layout: ParallelLayout,
    *,
    generation: int | None = None,
) -> Roster:
    """The roster of `target_layout` on `nodes` that leaves most state where it is, by a deterministic greedy choice.

    A TP group stays on one node where the nodes allow it. Nodes given first win ties. `generation` is by default the
    one after the source's. Raises PlanError when there are too few slots, LayoutError when the model does not fit.
    """
    check_fits(manifest, target_layout)
    _check_nodes(nodes, target_layout)
    areas = _Areas(source, target_layout)
    unit = target_layout.tp
    held = _units_to_nodes(areas, nodes, target_layout.world_size, unit) if unit > 1 else None
    held = held or _units_to_nodes(areas, nodes, target_layout.world_size, 1)
    if held is None:
        raise PlanError("no placement found although there are enough slots")
    members: list[Member | None] = [None] * target_layout.world_size
    for node, ranks in zip(nodes, held, strict=True):
        for rank, slot in _ranks_to_slots(areas, node, ranks):
            members[rank] = Member(node.node_id, slot)
    return Roster(
        job_id=source.job_id,
        generation=source.generation + 1 if generation is None else generation,
        layout=target_layout,
        members=tuple(member for member in members if member),
    )


def seat(layout: ParallelLayout, kept: Sequence[Member], free: Sequence[Member]) -> tuple[Member, ...]:
    """The member of each rank where only places are known: `kept` hold state now, in rank order; `free` come after.

    As many TP groups as the nodes can hold lie whole on one node each. Among such seatings, as many of `kept` as
    possible stay, and in their order. What nodes cannot hold whole is spread, in the same order. Raises PlanError when
    there are too few members.
    """
    members = [*kept, *free]
    if len(members) < layout.world_size:
        raise PlanError(f"{layout} needs {layout.world_size} members, {len(members)} can be had")
    on_node: dict[str, list[int]] = defaultdict(list)
    for place, member in enumerate(members):
        on_node[member.node_id].append(place)
    size, groups = layout.tp, layout.world_size // layout.tp
    whole = [there[at : at + size] for there in on_node.values() for at in range(0, len(there) - size + 1, size)]
    # Places of a node rise, so those of `kept` come first in a group.
    whole.sort(key=lambda group: (-bisect_left(group, len(kept)), group[0]))
    chosen = whole[:groups]
    seated = {place for group in chosen for place in group}
    rest = [place for place in range(len(members)) if place not in seated]
    chosen += [rest[at * size : (at + 1) * size] for at in range(groups - len(chosen))]
    return tuple(members[place] for group in sorted(chosen, key=itemgetter(0)) for place in group)


def _check_nodes(nodes: Sequence[NodeSlots], layout: ParallelLayout) -> None:
    names = [node.node_id for node in nodes]
    if len(set(names)) != len(names):
        raise PlanError(f"nodes: one is given twice among {', '.join(sorted(names))}")
    slots = sum(node.slots for node in nodes)
    if slots < layout.world_size:
        raise PlanError(f"{layout} needs {layout.world_size} slots, {len(nodes)} nodes have {slots}")


class _Areas:
    """For every target rank the source ranks whose rectangles overlap its own, with the shared area in whole units."""

    def __init__(self, source: Roster, target_layout: ParallelLayout) -> None:
        self._source = source
        self._target_layout = target_layout

    def shared(self, target_rank: int) -> list[tuple[int, int]]:
        """(source rank, area) of every source rank that shares some."""
        source, target = self._source.layout, self._target_layout
        at = target.coordinates(target_rank)
        depth = _overlaps(_depth(target, at.pp, at.dp * target.cp + at.cp), _steps(target), _steps(source))
        width = list(_overlaps(at.tp, target.tp, source.tp))
        found = []
        for step, shared_depth in depth:
            stage, reversed_shard = divmod(step, source.shards)
            dp, cp = divmod(source.shards - 1 - reversed_shard, source.cp)
            for tp, shared_width in width:
                found.append((source.rank_of(tp=tp, cp=cp, dp=dp, pp=stage), shared_depth * shared_width))
        return found

    def member_of(self, source_rank: int) -> Member:
        """Where a source rank lives."""
        return self._source.members[source_rank]


def _steps(layout: ParallelLayout) -> int:
    return layout.pp * layout.shards


def _depth(layout: ParallelLayout, stage: int, shard: int) -> int:
    # Buffers hold parameters in reverse order, so the first ZeRO-1 shard of a stage owns its deepest layers.
    return stage * layout.shards + layout.shards - 1 - shard


def _overlaps(index: int, parts: int, other_parts: int) -> Iterator[tuple[int, int]]:
    """What part `index` of `parts` shares with each of `other_parts`, in units of 1 / (parts * other_parts)."""
    low, high = index * other_parts, (index + 1) * other_parts
    for other in range(low // parts, (high - 1) // parts + 1):
        yield other, min(high, (other + 1) * parts) - max(low, other * parts)


def _units_to_nodes(areas: _Areas, nodes: Sequence[NodeSlots], ranks: int, unit: int) -> list[list[int]] | None:
    """The ranks of every node, given out in units of consecutive ranks; None when units do not fit whole."""
    positions = {node.node_id: position for position, node in enumerate(nodes)}
    shared: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        for source_rank, area in areas.shared(rank):
            position = positions.get(areas.member_of(source_rank).node_id)
            if position is not None:
                shared[rank // unit, position] += area
    free = [node.slots for node in nodes]
    held: list[list[int]] = [[] for _ in nodes]
    placed: set[int] = set()
    best_first = sorted(shared, key=lambda pair: (-shared[pair], pair))
    anywhere = ((first, position) for first in range(ranks // unit) for position in range(len(nodes)))
    for first, position in chain(best_first, anywhere):
        if first not in placed and free[position] >= unit:
            placed.add(first)
            free[position] -= unit
            held[position] += range(first * unit, (first + 1) * unit)
    return held if len(placed) == ranks // unit else None


def _ranks_to_slots(areas: _Areas, node: NodeSlots, ranks: list[int]) -> list[tuple[int, int]]:
    """(rank, slot) inside one node: the processes that hold most of a rank's state come first."""
    shared = []
    for rank in ranks:
        for source_rank, area in areas.shared(rank):
            member = areas.member_of(source_rank)
            if member.node_id == node.node_id and member.slot < node.slots:
                shared.append((-area, rank, member.slot))
    anywhere = ((0, rank, slot) for rank in sorted(ranks) for slot in range(node.slots))
    slots: dict[int, int] = {}
    for _, rank, slot in chain(sorted(shared), anywhere):
        if rank not in slots and slot not in slots.values():
            slots[rank] = slot
    return sorted(slots.items())
