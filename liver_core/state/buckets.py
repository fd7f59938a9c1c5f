"""Gradient buckets of one rank: Megatron's rule for them, and the rank's pieces of them as one region.

Each bucket is divided over the data-parallel ranks by itself, so what a rank owns lies in one piece a bucket. Where the
pieces follow each other (one bucket, or one data-parallel rank) the region is a view of Megatron's buffer. Elsewhere
fp32 masters have memory of their own, and gradients are moved together inside Megatron's buffer for a handoff.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from liver_core.layout import BucketRule, RankShards
from liver_core.state.live_state import LiveState

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


def region_over(buffer: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Where a rank's pieces of a gradient buffer lie end to end when they are collected: a view of the buffer.

    In place where they do so by themselves, else at the buffer's front, which nobody reads any more once gradients are
    reduced: it is other ranks' parts of the first buckets, or this rank's own.
    """
    whole = one_view(parts)
    return buffer[: sum(part.numel() for part in parts)] if whole is None else whole


def collect_gradients(live: LiveState) -> None:
    """As a source, before others read the region: move the reduced gradients there; no step until `return_gradients`.

    No place in the region lies behind the piece that goes there, so going up overwrites nothing still to be moved.
    """
    for piece, window in _moves(live):
        _move(piece, window)
    live.collected = True


def return_gradients(live: LiveState) -> None:
    """As a source whose step is not handed over after all: gradients that were collected go back, bit for bit."""
    if live.collected:
        spread_gradients(live)


def spread_gradients(live: LiveState) -> None:
    """As a target, before the step that was handed over: move gradients from the region to Megatron's buckets."""
    for piece, window in reversed(_moves(live)):
        _move(window, piece)
    live.collected = False


def _moves(live: LiveState) -> list[tuple[torch.Tensor, torch.Tensor]]:
    windows = live.regions["grad"].split([piece.numel() for piece in live.gradients])
    return list(zip(live.gradients, windows, strict=True))


def _move(source: torch.Tensor, target: torch.Tensor) -> None:
    apart = abs(int(source.storage_offset()) - int(target.storage_offset()))
    if apart:
        # Torch refuses to copy between parts that overlap.
        target.copy_(source.clone() if apart < source.numel() else source)
