"""Which parameters are cut between ranks only after an even number of elements, so that pairs stay together. Pure."""

from __future__ import annotations

from liver_core.layout.manifest import Manifest, ParameterSpec
from liver_core.layout.parallel import ParallelLayout
from liver_core.layout.shards import stage_buckets


def paired_parameters(manifest: Manifest, *layouts: ParallelLayout) -> frozenset[str]:
    """Names of the parameters of which no rank of any of the layouts holds half a pair.

    A pair is the elements 2k and 2k + 1 of the flat global parameter. Every resident box of a parameter named here
    begins and ends between pairs, in the parameter and in the region. A few parameters may be left out that could be
    named; which ones depends on manifest and layouts alone, so that all ranks of both worlds agree.
    """
    if any(_splits_pairs(manifest, layout) for layout in layouts):
        return frozenset()
    return frozenset(
        spec.name for spec in manifest.parameters if all(_row_width(spec, layout) % 2 == 0 for layout in layouts)
    )


def _splits_pairs(manifest: Manifest, layout: ParallelLayout) -> bool:
    """Whether ZeRO-1 cuts a bucket after an odd number of elements, or a parameter begins after one."""
    buckets = (bucket for stage in range(layout.pp) for bucket in stage_buckets(manifest, layout, stage))
    return manifest.bucket_rule.align_elements % 2 != 0 or any(
        bucket.shard_numel(layout) % 2 != 0 for bucket in buckets
    )


def _row_width(spec: ParameterSpec, layout: ParallelLayout) -> int:
    """Elements of the last dim that lie together on one rank; odd where they are not the same for all ranks."""
    last = len(spec.shape) - 1
    parts = layout.cut(expert=spec.is_expert) * spec.blocks if spec.tp_dim == last else 1
    return spec.shape[last] // parts if spec.shape[last] % parts == 0 else 1
