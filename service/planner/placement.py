"""Which nodes hold the ranks of a layout, and which rank goes where. Pure.

Within `nodes.min` and `nodes.max` of the job: a TP group lies on one node wherever any choice of nodes keeps it there,
and so do EP x ETP groups where all of them can; ranks that hold state stay; the nodes given first are taken first;
neighbours in DP, then in PP, lie side by side.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from liver_core.layout import Member, ParallelLayout
from liver_core.reshard import seat
from liver_core.reshard.seating import near_units
from service.planner.inputs import PlanInputs, PlanNode

FEWER_WHOLE_GROUPS_MAX = 64
"""So many numbers of whole TP groups are tried where not all can lie on one node each."""


def preferred(inputs: PlanInputs) -> tuple[PlanNode, ...]:
    """Nodes of the present world first, in rank order; then those of its zones; then larger ones, of those the ones
    that no cloud has warned of, then zone by zone, by name; last those that have outlived their announced end. That a
    member may be taken moves no job."""
    members = inputs.world.node_ids() if inputs.world else ()
    order = {node_id: index for index, node_id in enumerate(members)}
    near = {node.zone for node in inputs.nodes if node.node_id in order and node.zone}
    slots: Counter[str] = Counter()
    for node in inputs.nodes:
        slots[node.zone] += node.slots

    def rank(node: PlanNode) -> tuple:
        is_far = bool(near and node.zone and node.zone not in near)
        at = order.get(node.node_id, len(order))
        return (at, node.is_overdue, is_far, -node.slots, node.is_at_risk, -slots[node.zone], node.zone, node.node_id)

    return tuple(sorted(inputs.nodes, key=rank))


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes that a job may use, the preferred first, and how many of them it must and may use."""

    nodes: tuple[PlanNode, ...]
    least: int
    most: int
    _groups: dict[int, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    def slots(self) -> int:
        """The most ranks that it may have."""
        return self._whole_groups(1)[0]

    def near(self, layout: ParallelLayout) -> int:
        """How many ranks one after the other can lie on one node everywhere: those of the groups that talk in each
        layer, else those of a TP group, else one."""
        return next((size for size in near_units(layout) if self.keeps_groups(layout, size)), 1)

    def keeps_groups(self, layout: ParallelLayout, size: int) -> bool:
        """Whether all groups of so many ranks can lie on one node each."""
        groups, nodes = self._whole_groups(size)
        needed = layout.world_size // size
        return self.least <= min(needed, nodes) and needed <= groups

    def holds(self, layout: ParallelLayout) -> bool:
        """Whether there is a slot for every rank, on as many nodes as the job must use."""
        return self.least <= min(layout.world_size, len(self.nodes)) and layout.world_size <= self.slots()

    def _whole_groups(self, size: int) -> tuple[int, int]:
        """How many groups of this size `most` nodes hold, each on one node; how many nodes hold any."""
        if size not in self._groups:
            held = sorted((node.slots // size for node in self.nodes), reverse=True)
            self._groups[size] = sum(held[: self.most]), sum(count > 0 for count in held)
        return self._groups[size]


def place(layout: ParallelLayout, room: NodeChoice, world: Sequence[Member] = ()) -> tuple[Member, ...] | None:
    """The member of each rank; None where the layout cannot lie there. `world`: the members that hold state now, in
    rank order. They keep their order and as many of their places as the rules above allow."""
    if not room.holds(layout):
        return None
    ranks = _ranks_by_node(layout, room, _kept(room, world))
    return None if ranks is None else _seated(layout, room, ranks, world)


def _kept(room: NodeChoice, world: Sequence[Member]) -> Counter[str]:
    slots = {node.node_id: node.slots for node in room.nodes}
    return Counter(member.node_id for member in world if member.slot < slots.get(member.node_id, 0))


def _ranks_by_node(layout: ParallelLayout, room: NodeChoice, kept: Counter[str]) -> dict[str, int] | None:
    """How many ranks each node gets: all groups whole that can be, else as many TP groups as can be."""
    size, world = room.near(layout), layout.world_size
    if size >= layout.tp and room.keeps_groups(layout, size):
        groups = _groups_by_node(room, size, world // size, room.least, kept)
        return None if groups is None else {name: count * size for name, count in groups.items()}
    size = layout.tp
    most = min(world // size, sum(node.slots // size for node in room.nodes))
    tried = range(most, max(0, most - FEWER_WHOLE_GROUPS_MAX), -1)
    for whole in (*tried, 0) if size > 1 else (0,):
        found = _with_singles(room, size, whole, world - whole * size, kept)
        if found is not None:
            return found
    return None


def _groups_by_node(room: NodeChoice, size: int, groups: int, least: int, kept: Counter[str]) -> dict[str, int] | None:
    """Whole groups only, on at least `least` nodes: those with state keep what they have, the first get the rest."""
    picked = _picked(room.nodes, lambda node: node.slots // size, need=groups, least=least, most=room.most)
    if picked is None or len(picked) > groups:
        return None
    given = {node.node_id: 1 for node in picked}
    left = groups - len(given)
    for wanted in (lambda node: kept[node.node_id] // size, lambda node: node.slots // size):
        for node in picked:
            more = min(left, max(0, wanted(node) - given[node.node_id]))
            given[node.node_id] += more
            left -= more
    return given


def _with_singles(room: NodeChoice, size: int, whole: int, singles: int, kept: Counter[str]) -> dict[str, int] | None:
    """`whole` groups on one node each, and `singles` ranks of groups that are spread."""
    groups = _groups_by_node(room, size, whole, max(0, room.least - singles), kept) if whole else {}
    if groups is None:
        return None
    given = {name: count * size for name, count in groups.items()}
    left = {node.node_id: node.slots - given.get(node.node_id, 0) for node in room.nodes}
    inside = sum(left[name] for name in given)
    fewest = max(0, room.least - len(given))
    others = [node for node in room.nodes if node.node_id not in given]
    need = max(singles - inside, fewest)
    picked = _picked(others, lambda node: node.slots, need=need, least=fewest, most=room.most - len(given))
    if picked is None or len(picked) > singles:
        return None
    given |= {node.node_id: 1 for node in picked}
    singles -= len(picked)
    for wanted in (lambda node: kept[node.node_id], lambda node: node.slots):
        for node in (node for node in room.nodes if node.node_id in given):
            more = min(singles, max(0, wanted(node) - given[node.node_id]))
            given[node.node_id] += more
            singles -= more
    return given if singles == 0 else None


def _picked(
    nodes: Sequence[PlanNode], capacity: Callable[[PlanNode], int], *, need: int, least: int, most: int
) -> list[PlanNode] | None:
    """The first nodes that together hold `need` and are between `least` and `most`: a node is passed over only where
    it has no room, or where with it too few others could be taken to hold the rest."""
    sizes = Counter(capacity(node) for node in nodes)
    picked, have = [], 0
    for node in nodes:
        if have >= need and len(picked) >= least:
            break
        size = capacity(node)
        sizes[size] -= 1
        if size and have + size + _largest(sizes, most - len(picked) - 1) >= need and len(picked) < most:
            picked.append(node)
            have += size
    return picked if have >= need and len(picked) >= least else None


def _largest(sizes: Counter[int], count: int) -> int:
    """The sum of the `count` largest sizes."""
    total = 0
    for size in sorted(sizes, reverse=True):
        taken = min(count, sizes[size])
        total, count = total + taken * size, count - taken
        if count <= 0:
            break
    return total


def _seated(
    layout: ParallelLayout, room: NodeChoice, ranks: dict[str, int], world: Sequence[Member]
) -> tuple[Member, ...]:
    """The members on each node that hold state come first, in rank order, then its free slots."""
    left, kept = dict(ranks), []
    slots = {node.node_id: node.slots for node in room.nodes}
    for member in world:
        if left.get(member.node_id, 0) and member.slot < slots[member.node_id]:
            kept.append(member)
            left[member.node_id] -= 1
    taken, free = defaultdict[str, set[int]](set), list[Member]()
    for member in kept:
        taken[member.node_id].add(member.slot)
    for node in room.nodes:
        if wanted := left.get(node.node_id, 0):
            there = (slot for slot in range(node.slots) if slot not in taken[node.node_id])
            free += (Member(node_id=node.node_id, slot=slot) for slot in islice(there, wanted))
    return seat(layout, kept, free)
