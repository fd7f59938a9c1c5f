"""Who holds a box in the source world: found by arithmetic from the layout, never by looking at every rank. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from liver_core.layout import Box, LocalParameter, Manifest, ParallelLayout, local_to_global_boxes
from liver_core.layout.local_parameters import experts_each, holder_ep, stages_of
from liver_core.layout.parallel import BufferClass
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
    """Where a parameter lies on the ranks of one stage: inside its bucket, and the bucket's part in the region. That of
    an expert is that of the first share of the experts, where each other share has one of its own at the same place."""

    stage: int
    of: BufferClass
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

    Replicas are ranks of one TP (or ETP) group for a parameter that it does not split, and the first and last stage for
    a tied embedding. ZeRO-1 leaves no others: within a DP x CP (or expert DP) group every element has one owner.
    """
    spec = manifest.parameter(tensor)
    ep, alike = holder_ep(manifest, layout, spec), spec
    if spec.is_expert:
        alike = manifest.of_expert(spec, spec.expert - ep * experts_each(manifest, layout))
    slots = [_slots(manifest, layout, stage)[alike.tensor] for stage in stages_of(manifest, layout, spec)]
    of, cut = slots[0].of, layout.cut(expert=spec.is_expert)
    for part, first, last in _shards_touched(slots[0], cut, box):
        parts = range(cut) if spec.tp_dim is None else (part,)
        for shard in range(first, last + 1):
            bases = tuple(
                sorted(
                    (layout.owner(of, cut=each, shard=shard, ep=ep, pp=slot.stage), slot.owned(shard)[2])
                    for slot in slots
                    for each in parts
                )
            )
            for held, offset in _owned_boxes(slots[0], cut, part, shard):
                yield Holding(held, tuple((rank, base + offset) for rank, base in bases))


@lru_cache(maxsize=512)
def _slots(manifest: Manifest, layout: ParallelLayout, stage: int) -> dict[str, _Slot]:
    found: dict[str, _Slot] = {}
    offset = 0
    for bucket in stage_buckets(manifest, layout, stage):
        size = bucket.shard_numel(layout)
        for start, local in bucket.parameters:
            found[local.spec.tensor] = _Slot(stage, bucket.buffer.of, local, start, size, offset)
        offset += size
    return found


def _shards_touched(slot: _Slot, cut: int, box: Box) -> Iterator[tuple[int, int, int]]:
    """(part of `cut`, first shard, last shard) that may hold a part of `box`; part 0 where nothing is cut.

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
        begin = block * part * cut
        low, high = max(box.start[dim], begin), min(box.stop[dim], begin + part * cut)
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


def _owned_boxes(slot: _Slot, cut: int, part: int, shard: int) -> list[tuple[Box, int]]:
    low, high, _ = slot.owned(shard)
    return local_to_global_boxes(slot.local.spec, cut, part, low, high)
