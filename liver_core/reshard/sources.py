"""Who holds a box in the source world: found by arithmetic from the layout, never by looking at every rank. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from liver_core.layout import Box, LocalParameter, Manifest, ParallelLayout, local_to_global_boxes
from liver_core.layout.local_parameters import stages_of
from liver_core.layout.shards import stage_buckets


@dataclass(frozen=True, slots=True)
class Holding:
    """A box that lies contiguous, row-major, in the regions of one or more source ranks (equal replicas).

    `holders` are (rank, region offset of the box), ascending by rank.
    """

    box: Box
    holders: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a parameter lies on the ranks of one stage: inside its bucket, and the bucket's part in the region."""

    stage: int
    local: LocalParameter
    start: int
    shard_numel: int
    region_offset: int

    def owned(self, shard: int) -> tuple[int, int, int]:
        """(first, one past the last flat local element, region offset) of what a ZeRO-1 shard owns."""
        low = max(self.start, shard * self.shard_numel)
        high = min(self.start + self.local.numel, (shard + 1) * self.shard_numel)
        return low - self.start, high - self.start, self.region_offset + low - shard * self.shard_numel

    def shard_of(self, element: int) -> int:
        """The ZeRO-1 shard that owns a flat local element."""
        return (self.start + element) // self.shard_numel


def holdings(manifest: Manifest, layout: ParallelLayout, tensor: str, box: Box) -> Iterator[Holding]:
    """The source boxes that overlap `box` of a tensor. Together they hold it completely, each element once.

    Replicas are ranks of one TP group for a parameter that TP does not split, and the first and last stage for a tied
    embedding. ZeRO-1 leaves no others: within a DP x CP group every element has one owner.
    """
    spec = manifest.parameter(tensor)
    slots = [_slots(manifest, layout, stage)[tensor] for stage in stages_of(manifest, layout, spec)]
    whole = spec.tp_dim is None
    for tp, first, last in _shards_touched(slots[0], layout, box):
        for shard in range(first, last + 1):
            dp, cp = divmod(shard, layout.cp)
            bases = tuple(
                sorted(
                    (layout.rank_of(tp=each, cp=cp, dp=dp, pp=slot.stage), slot.owned(shard)[2])
                    for slot in slots
                    for each in (range(layout.tp) if whole else (tp,))
                )
            )
            for held, offset in _owned_boxes(slots[0], layout, tp, shard):
                yield Holding(held, tuple((rank, base + offset) for rank, base in bases))


@lru_cache(maxsize=512)
def _slots(manifest: Manifest, layout: ParallelLayout, stage: int) -> dict[str, _Slot]:
    found: dict[str, _Slot] = {}
    offset = 0
    for bucket in stage_buckets(manifest, layout, stage):
        size = bucket.padded_numel // layout.shards
        for start, local in bucket.parameters:
            found[local.spec.tensor] = _Slot(stage, local, start, size, offset)
        offset += size
    return found


def _shards_touched(slot: _Slot, layout: ParallelLayout, box: Box) -> Iterator[tuple[int, int, int]]:
    """(TP index, first shard, last shard) that may hold a part of `box`; TP index 0 where TP does not split.

    The shards between the first and the last element of the box in flat order; for a box that is narrow in an inner
    dim some of them hold nothing of it.
    """
    spec, shape = slot.local.spec, slot.local.shape
    if spec.tp_dim is None:
        yield 0, slot.shard_of(_flat(shape, box.start)), slot.shard_of(_flat_last(shape, box))
        return
    dim, part = spec.tp_dim, shape[spec.tp_dim] // spec.blocks
    spans: dict[int, list[int]] = {}
    for block in range(spec.blocks):
        begin = block * part * layout.tp
        low, high = max(box.start[dim], begin), min(box.stop[dim], begin + part * layout.tp)
        for tp in range((low - begin) // part, (high - 1 - begin) // part + 1) if low < high else ():
            shift = block * part - begin - tp * part
            tp_low, tp_high = begin + tp * part, begin + (tp + 1) * part
            start = [*box.start[:dim], max(low, tp_low) + shift, *box.start[dim + 1 :]]
            last = [*box.stop[:dim], min(high, tp_high) + shift, *box.stop[dim + 1 :]]
            local = Box(tuple(start), tuple(last))
            spans.setdefault(tp, []).extend((_flat(shape, local.start), _flat_last(shape, local)))
    for tp, ends in sorted(spans.items()):
        yield tp, slot.shard_of(min(ends)), slot.shard_of(max(ends))


def _flat(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    flat = 0
    for size, position in zip(shape, index, strict=True):
        flat = flat * size + position
    return flat


def _flat_last(shape: tuple[int, ...], box: Box) -> int:
    return _flat(shape, tuple(stop - 1 for stop in box.stop))


def _owned_boxes(slot: _Slot, layout: ParallelLayout, tp: int, shard: int) -> list[tuple[Box, int]]:
    low, high, _ = slot.owned(shard)
    return local_to_global_boxes(slot.local.spec, layout.tp, tp, low, high)
