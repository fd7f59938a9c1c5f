"""What a rank holds, as boxes in the global coordinates of each parameter. Pure.

This is the one place where flat ranges become boxes; everything after it (planner, checker, certificate) sees boxes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from liver_core.layout.boxes import Box, flat_range_to_boxes
from liver_core.layout.manifest import Manifest, ParameterSpec
from liver_core.layout.parallel import ParallelLayout
from liver_core.layout.shards import shard_ranges


@dataclass(frozen=True, slots=True)
class ResidentBox:
    """A box of one parameter, contiguous and row-major at region[offset:]. `parameter` is a ParameterSpec.tensor."""

    parameter: str
    box: Box
    offset: int


@lru_cache(maxsize=4096)
def resident_boxes(manifest: Manifest, layout: ParallelLayout, rank: int) -> tuple[ResidentBox, ...]:
    """Everything a rank holds, by ascending offset; padding is in no box. Raises LayoutError if it does not fit."""
    at = layout.coordinates(rank)
    found = []
    for shard in shard_ranges(manifest, layout, rank).parameters:
        spec = manifest.parameter(shard.tensor)
        part = layout.part(at, expert=spec.is_expert)
        size = layout.cut(expert=spec.is_expert)
        for box, offset in local_to_global_boxes(spec, size, part, shard.param_start, shard.param_stop):
            found.append(ResidentBox(shard.tensor, box, shard.region_offset + offset))
    return tuple(found)


def local_to_global_boxes(spec: ParameterSpec, tp_size: int, tp: int, start: int, stop: int) -> list[tuple[Box, int]]:
    """A flat range of part `tp` of `tp_size` of a parameter as (global box, offset from `start`), in flat order.

    The range is first cut where one gated block ends and the next begins, since the two halves of the local tensor
    lie apart in the global one; each piece is at most 2n-1 boxes.
    """
    shape = spec.local_shape(tp_size)
    if spec.tp_dim is None:
        return _in_flat_order(flat_range_to_boxes(shape, start, stop), 0)
    part = shape[spec.tp_dim] // spec.blocks
    block_numel = prod(shape) // spec.blocks
    found, at = [], start
    while at < stop:
        block = at // block_numel
        end = min(stop, (block + 1) * block_numel)
        # Block b begins at b * part in the local tensor and at b * TP * part + tp * part in the global one.
        shift = block * part * (tp_size - 1) + tp * part
        boxes = (box.shift(spec.tp_dim, shift) for box in flat_range_to_boxes(shape, at, end))
        found += _in_flat_order(boxes, at - start)
        at = end
    return found


def _in_flat_order(boxes: Iterable[Box], offset: int) -> list[tuple[Box, int]]:
    found = []
    for box in boxes:
        found.append((box, offset))
        offset += box.numel
    return found
