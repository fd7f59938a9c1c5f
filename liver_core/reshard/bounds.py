"""The least that must move: what a plan is measured against. Independent of the planner. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable

from liver_core.layout import Box, Manifest, ResidentBox, Roster, resident_boxes


def missing_bytes(
    manifest: Manifest,
    source: Roster,
    target: Roster,
    target_rank: int,
    *,
    kinds: Collection[str],
    kept: Iterable[ResidentBox] = (),
) -> int:
    """Bytes of these kinds of a target rank's parameters that its own process does not hold in the source world, nor
    has `kept` of what others held there."""
    wanted = resident_boxes(manifest, target.layout, target_rank)
    names = {resident.parameter for resident in wanted}
    sizes = {name: manifest.element_bytes(manifest.parameter(name), kinds) for name in names}
    total = sum(resident.box.numel * sizes[resident.parameter] for resident in wanted)
    own_rank = source.rank_of(target.members[target_rank])
    if own_rank is None:
        return total
    held: defaultdict[str, list[Box]] = defaultdict(list)
    for resident in resident_boxes(manifest, source.layout, own_rank):
        held[resident.parameter].append(resident.box)
    for resident in kept:
        held[resident.parameter].append(resident.box)
    # Boxes of one rank are disjoint, so what it holds of a box is the sum over its boxes.
    pairs = (
        (resident.parameter, box.intersect(resident.box)) for resident in wanted for box in held[resident.parameter]
    )
    return total - sum(box.numel * sizes[name] for name, box in pairs if box)
