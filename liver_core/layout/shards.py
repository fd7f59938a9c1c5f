"""ZeRO-1: which flat range of every parameter a rank's optimizer owns, and where it lies in the rank's region. Pure.

The rule is megatron-core 0.16.1's (`distributed/param_and_grad_buffer.py`, `optimizer/distrib_optimizer.py`):
parameters in reverse registration order, starts aligned, bucket ends padded, each bucket cut into DP x CP equal
parts of which the rank owns one; with EP the experts lie in buckets of their own, cut into expert-DP parts. The region
is the concatenation of the rank's parts over all buckets, those of dense parameters first.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from liver_core.layout.layout_error import LayoutError
from liver_core.layout.local_parameters import LocalParameter, stage_parameters
from liver_core.layout.manifest import BucketRule, Manifest
from liver_core.layout.parallel import BufferClass, ParallelLayout

_HIGH_BANDWIDTH_MULTIPLE = 2**16


class BufferKey(NamedTuple):
    """Megatron makes one buffer for each of these: a model chunk's parameters of one dtype whose gradients have one."""

    of: BufferClass
    chunk: int
    param_dtype: str
    grad_dtype: str


@dataclass(frozen=True, slots=True)
class BucketShard:
    """One bucket and this rank's part of it, in elements.

    buffer, index: which of Megatron's buffers, and number of the bucket in it.
    numel, padded_numel: of the whole bucket, without and with the padding of its end.
    start, stop: this rank's part, counted from the bucket's start.
    region_offset: where the part begins in the region.
    """

    buffer: BufferKey
    index: int
    numel: int
    padded_numel: int
    start: int
    stop: int
    region_offset: int


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The part of one parameter that a rank owns: elements param_start <= i < param_stop of its flat TP-local shard.

    They lie at region[region_offset:]. `tensor` is the name under which the elements are known (see ParameterSpec).
    """

    name: str
    tensor: str
    local_shape: tuple[int, ...]
    param_start: int
    param_stop: int
    region_offset: int

    @property
    def numel(self) -> int:
        """Elements owned."""
        return self.param_stop - self.param_start


@dataclass(frozen=True, slots=True)
class RankShards:
    """All that one rank's optimizer owns. `parameters` ascend by region offset; those it owns nothing of are absent."""

    rank: int
    buckets: tuple[BucketShard, ...]
    parameters: tuple[ParameterShard, ...]
    region_numel: int


def shard_ranges(manifest: Manifest, layout: ParallelLayout, rank: int) -> RankShards:
    """The ZeRO-1 shards of a rank. Raises LayoutError when the model does not fit the layout."""
    at = layout.coordinates(rank)
    buckets: list[BucketShard] = []
    parameters: list[ParameterShard] = []
    offset = 0
    for bucket in stage_buckets(manifest, layout, at.pp, at.ep):
        size, shard = bucket.shard_numel(layout), layout.shard(bucket.buffer.of, at)
        start, stop = shard * size, (shard + 1) * size
        buckets.append(BucketShard(bucket.buffer, bucket.index, bucket.numel, bucket.padded_numel, start, stop, offset))
        for begin, local in bucket.parameters:
            low, high = max(start, begin), min(stop, begin + local.numel)
            if low < high:
                parameters.append(_parameter_shard(local, low - begin, high - begin, offset + low - start))
        offset += size
    return RankShards(rank=rank, buckets=tuple(buckets), parameters=tuple(parameters), region_numel=offset)


def check_share(manifest: Manifest, layout: ParallelLayout, rank: int) -> None:
    """Raises LayoutError where the rank owns no element: it could not know what steps do to the optimizer's state."""
    if not shard_ranges(manifest, layout, rank).parameters:
        raise LayoutError("layout", f"rank {rank} of {layout} owns no element of its stage, too small for its DP")


def region_numel(manifest: Manifest, layout: ParallelLayout, rank: int) -> int:
    """Elements of the rank's region of every state kind, padding included; equal on all ranks of a stage."""
    stage = layout.coordinates(rank).pp
    return sum(bucket.shard_numel(layout) for bucket in stage_buckets(manifest, layout, stage))


@dataclass(frozen=True, slots=True)
class Bucket:
    """A whole bucket: `parameters` are (start inside the bucket, parameter), ascending. Sizes as in BucketShard."""

    buffer: BufferKey
    index: int
    numel: int
    padded_numel: int
    parameters: tuple[tuple[int, LocalParameter], ...]

    def shard_numel(self, layout: ParallelLayout) -> int:
        """Elements of each rank's part, padding included."""
        return self.padded_numel // layout.shards(self.buffer.of)


def stage_buckets(manifest: Manifest, layout: ParallelLayout, stage: int, ep: int = 0) -> tuple[Bucket, ...]:
    """The buckets of every rank of a pipeline stage with that share of the experts; sizes are those of every share.

    Those of dense parameters, then those of experts, as Megatron chains their optimizers; in each, chunk after chunk,
    and in it buffer after buffer, in the order of their first parameters.
    """
    return _stage_buckets(manifest, layout, stage, ep if manifest.num_experts else 0)


@lru_cache(maxsize=512)
def _stage_buckets(manifest: Manifest, layout: ParallelLayout, stage: int, ep: int) -> tuple[Bucket, ...]:
    rule = manifest.bucket_rule
    held_in: dict[BufferKey, list[LocalParameter]] = {}
    for local in stage_parameters(manifest, layout, stage, ep):
        of = layout.buffer_class(expert=local.spec.is_expert)
        key = BufferKey(of, local.chunk, local.spec.dtype, manifest.gradient_dtype(local.spec))
        held_in.setdefault(key, []).append(local)
    found: list[Bucket] = []
    for key in sorted(held_in, key=lambda key: key.of is BufferClass.EXPERT):
        held = held_in[key]
        # DistributedDataParallel turns bucketing off on later stages, and the caller on later chunks.
        elements_max = rule.elements_max_at(layout.dp) if stage == 0 and key.chunk == 0 else None
        groups = _cut_into_buckets(manifest, layout, held[::-1], elements_max)
        for index, (numel, group) in enumerate(groups):
            padded = _round_up(numel, _end_divisor(rule, layout.shards(key.of)))
            found.append(Bucket(key, index, numel, padded, tuple(group)))
    return tuple(found)


def _cut_into_buckets(
    manifest: Manifest, layout: ParallelLayout, reversed_parameters: list[LocalParameter], elements_max: int | None
) -> list[tuple[int, list[tuple[int, LocalParameter]]]]:
    """Elements of each bucket, and (start inside the bucket, parameter) of all that is in it.

    Where a parameter that has a bucket of its own ends the one before, Megatron counts up to its aligned start. A start
    aligned inside its bucket is aligned in the buffer too, since buckets end at multiples of the alignment.
    """
    groups: list[tuple[int, list[tuple[int, LocalParameter]]]] = []
    group: list[tuple[int, LocalParameter]] = []
    stop = 0
    for local in reversed_parameters:
        alone = _needs_own_bucket(manifest, layout, local)
        if alone and group:
            groups.append((_round_up(stop, manifest.bucket_rule.align_elements), group))
            group, stop = [], 0
        start = _round_up(stop, manifest.bucket_rule.align_elements)
        stop = start + local.numel
        group.append((start, local))
        if alone or (elements_max is not None and stop >= elements_max):
            groups.append((stop, group))
            group, stop = [], 0
    return [*groups, (stop, group)] if group else groups


def _needs_own_bucket(manifest: Manifest, layout: ParallelLayout, local: LocalParameter) -> bool:
    """A tied embedding with several stages: both copies must be sharded alike (`_does_param_require_new_bucket`)."""
    return layout.pp > 1 and (bool(local.spec.tied_to) or manifest.has_copy(local.name))


def _end_divisor(rule: BucketRule, shards: int) -> int:
    divisor = lcm(shards, rule.end_multiple)
    return lcm(divisor, _HIGH_BANDWIDTH_MULTIPLE) if rule.high_bandwidth_padding else divisor


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _parameter_shard(local: LocalParameter, start: int, stop: int, region_offset: int) -> ParameterShard:
    return ParameterShard(
        name=local.name,
        tensor=local.spec.tensor,
        local_shape=local.shape,
        param_start=start,
        param_stop=stop,
        region_offset=region_offset,
    )
