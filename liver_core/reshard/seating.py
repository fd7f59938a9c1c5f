"""Which process gets which rank of a target layout, so that little has to move: greedy, per node first. Pure.

A rank's state is pictured as a rectangle: the depth of the model it holds (pipeline stage, and its ZeRO-1 part of the
stage) by the width (its TP part). Its experts are another one, as wide as its part of them all (EP and ETP). What two
ranks share is the area that their rectangles share, weighed by the elements in each. This is an estimate (exact in the
middle of even models), which is enough to choose a place; the plan is exact whatever the place.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd, lcm, prod
from operator import itemgetter

from liver_core.layout import Manifest, Member, ParallelLayout, Roster, check_fits
from liver_core.layout.parallel import BufferClass
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

    A TP group stays on one node where the nodes allow it, and with experts an EP x ETP group too. Nodes given first win
    ties. `generation` is by default the one after the source's. Raises PlanError when there are too few slots,
    LayoutError when the model does not fit.
    """
    check_fits(manifest, target_layout)
    _check_nodes(nodes, target_layout)
    areas = _Areas(manifest, source, target_layout)
    tries = (_units_to_nodes(areas, nodes, target_layout.world_size, unit) for unit in near_units(target_layout))
    held = next((each for each in tries if each is not None), None)
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

    As many TP groups as the nodes can hold lie whole on one node each, and with EP as many EP x ETP groups where all of
    them find one. Among such seatings, as many of `kept` as possible stay, and in their order. What nodes cannot hold
    whole is spread, in the same order. Raises PlanError when there are too few members.
    """
    members = [*kept, *free]
    if len(members) < layout.world_size:
        raise PlanError(f"{layout} needs {layout.world_size} members, {len(members)} can be had")
    on_node: dict[str, list[int]] = defaultdict(list)
    for place, member in enumerate(members):
        on_node[member.node_id].append(place)
    wide, size = near_units(layout)[0], layout.tp
    if sum(len(there) // wide for there in on_node.values()) * wide >= layout.world_size:
        size = wide
    groups = layout.world_size // size
    whole = [there[at : at + size] for there in on_node.values() for at in range(0, len(there) - size + 1, size)]
    # Places of a node rise, so those of `kept` come first in a group.
    whole.sort(key=lambda group: (-bisect_left(group, len(kept)), group[0]))
    chosen = whole[:groups]
    seated = {place for group in chosen for place in group}
    rest = [place for place in range(len(members)) if place not in seated]
    chosen += [rest[at * size : (at + 1) * size] for at in range(groups - len(chosen))]
    return tuple(members[place] for group in sorted(chosen, key=itemgetter(0)) for place in group)


def near_units(layout: ParallelLayout) -> tuple[int, ...]:
    """How many ranks one after the other should share a node, best first: those of the groups that talk in each layer
    (EP x ETP), then of a TP group, then any."""
    return tuple(dict.fromkeys((lcm(layout.tp, layout.expert_tp * layout.ep), layout.tp, 1)))


def _check_nodes(nodes: Sequence[NodeSlots], layout: ParallelLayout) -> None:
    names = [node.node_id for node in nodes]
    if len(set(names)) != len(names):
        raise PlanError(f"nodes: one is given twice among {', '.join(sorted(names))}")
    slots = sum(node.slots for node in nodes)
    if slots < layout.world_size:
        raise PlanError(f"{layout} needs {layout.world_size} slots, {len(nodes)} nodes have {slots}")


class _Areas:
    """For every target rank the source ranks whose rectangles overlap its own, with the shared area in whole units."""

    def __init__(self, manifest: Manifest, source: Roster, target_layout: ParallelLayout) -> None:
        self._source = source
        self._target_layout = target_layout
        elements = Counter[bool]()
        for spec in manifest.parameters:
            elements[spec.is_expert] += spec.numel
        before = {expert: _Rectangles(source.layout, expert) for expert in elements}
        after = {expert: _Rectangles(target_layout, expert) for expert in elements}
        # Areas of one kind are in units of its own: each is multiplied by the number of units of the other.
        units = {expert: before[expert].parts * after[expert].parts for expert in elements}
        weights = {expert: elements[expert] * prod(units.values()) // units[expert] for expert in elements}
        common = gcd(*weights.values())
        self._kinds = [(after[each], before[each], weights[each] // common) for each in elements]

    def shared(self, target_rank: int) -> list[tuple[int, int]]:
        """(source rank, area) of every source rank that shares some."""
        found = Counter[int]()
        for target, source, weight in self._kinds:
            for rank, area in target.shared(target_rank, source):
                found[rank] += area * weight
        return list(found.items())

    def member_of(self, source_rank: int) -> Member:
        """Where a source rank lives."""
        return self._source.members[source_rank]


class _Rectangles:
    """Those of the ranks of a layout: of dense parameters, or of its experts."""

    def __init__(self, layout: ParallelLayout, expert: bool) -> None:
        self._layout, self._expert = layout, expert
        self._of = layout.buffer_class(expert=expert)
        self._shards = layout.shards(self._of)
        self._steps = layout.pp * self._shards
        self._ep = layout.ep if self._of is BufferClass.EXPERT else 1
        self._cut = layout.cut(expert=expert)

    @property
    def parts(self) -> int:
        """How many there are."""
        return self._steps * self._ep * self._cut

    def shared(self, rank: int, other: "_Rectangles") -> Iterator[tuple[int, int]]:
        """(rank of the other layout, area shared with it)."""
        at = self._layout.coordinates(rank)
        # Buffers hold parameters in reverse order, so the first ZeRO-1 shard of a stage owns its deepest layers.
        depth = at.pp * self._shards + self._shards - 1 - self._layout.shard(self._of, at)
        cut = at.etp if self._expert else at.tp
        experts = list(_overlaps(at.ep if self._ep > 1 else 0, self._ep, other._ep))
        widths = list(_overlaps(cut, self._cut, other._cut))
        for step, shared_depth in _overlaps(depth, self._steps, other._steps):
            stage, reversed_shard = divmod(step, other._shards)
            shard = other._shards - 1 - reversed_shard
            for ep, shared_experts in experts:
                for part, shared_width in widths:
                    found = other._layout.owner(other._of, cut=part, shard=shard, ep=ep, pp=stage)
                    yield found, shared_depth * shared_experts * shared_width


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
