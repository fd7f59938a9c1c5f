"""The least that must move: what a plan is measured against. Independent of the planner. Pure."""

from collections import defaultdict
from collections.abc import Iterable

from liver_core.layout import Box, Manifest, ResidentBox, Roster, resident_boxes


def missing_elements(
    manifest: Manifest, source: Roster, target: Roster, target_rank: int, kept: Iterable[ResidentBox] = ()
) -> int:
    """Elements of a target rank's parameters that its own process does not hold in the source world, nor has `kept`
    of what others held there."""
    wanted = resident_boxes(manifest, target.layout, target_rank)
    total = sum(resident.box.numel for resident in wanted)
    own_rank = source.rank_of(target.members[target_rank])
    if own_rank is None:
        return total
    held: defaultdict[str, list[Box]] = defaultdict(list)
    for resident in resident_boxes(manifest, source.layout, own_rank):
        held[resident.parameter].append(resident.box)
    for resident in kept:
        held[resident.parameter].append(resident.box)
    # Boxes of one rank are disjoint, so what it holds of a box is the sum over its boxes.
    common = (box.intersect(resident.box) for resident in wanted for box in held[resident.parameter])
    return total - sum(box.numel for box in common if box)
