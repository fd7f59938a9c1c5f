"""Gradient buckets of one rank: Megatron's rule for them, and the rank's pieces of them as one region.

Each bucket is divided over the data-parallel ranks by itself, so what a rank owns lies in one piece a bucket. Where the
pieces follow each other (one bucket, or one data-parallel rank) the region is a view of Megatron's buffer. Elsewhere it
has memory of its own: masters live in it, gradients are copied there and back when a handoff wants them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from liver_core.layout import BucketRule, RankShards

if TYPE_CHECKING:
    from liver_core.tensors.megatron import LiveState

# `DistributedDataParallel.__init__`: the size of a bucket where the job does not set one.
_DEFAULT_ELEMENTS = 40_000_000
_DEFAULT_ELEMENTS_PER_DP = 1_000_000


def bucket_rule(optimizer: Any) -> BucketRule:
    """How the buffer of a live DistributedOptimizer is cut, as it will be cut in a world of another layout.

    Megatron puts its default size, which depends on DP, in place of none and does not keep which it was: a size that
    equals the default is taken for it. Where that is wrong the next world's buckets are found to differ and refused.
    """
    config = optimizer.ddp_config
    size, padded = config.bucket_size, config.pad_buckets_for_high_nccl_busbw
    dp = optimizer.model_chunks[0].dp_group.size()
    if size != max(_DEFAULT_ELEMENTS, _DEFAULT_ELEMENTS_PER_DP * dp):
        return BucketRule(elements_max=size, high_bandwidth_padding=padded)
    return BucketRule(
        elements_max=_DEFAULT_ELEMENTS,
        elements_max_per_dp=_DEFAULT_ELEMENTS_PER_DP,
        high_bandwidth_padding=padded,
    )


def pieces(optimizer: Any, data: str, shards: RankShards) -> tuple[torch.Tensor, ...]:
    """This rank's part of every bucket, flat views in bucket order; `data` is "param_data" or "grad_data"."""
    buckets = optimizer.buffers[0].buckets
    return tuple(
        getattr(bucket, data)[part.start : part.stop] for bucket, part in zip(buckets, shards.buckets, strict=True)
    )


def one_view(parts: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Parts of one buffer as one flat view where each begins at the end of the one before, else None."""
    for part, following in pairwise(parts):
        if part.storage_offset() + part.numel() != following.storage_offset():
            return None
    return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))


def collect_gradients(live: LiveState) -> None:
    """As a source, before others read the region: put the reduced gradients there. Nothing to do where it is a view."""
    for piece, window in _apart(live):
        window.copy_(piece)


def spread_gradients(live: LiveState) -> None:
    """As a target, before the step that was handed over: put the gradients of the region into Megatron's buckets."""
    for piece, window in _apart(live):
        piece.copy_(window)


def _apart(live: LiveState) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    region = live.regions["grad"]
    if region.untyped_storage()._cdata != live.gradients[0].untyped_storage()._cdata:
        yield from zip(live.gradients, region.split([piece.numel() for piece in live.gradients]), strict=True)
