"""Gradient buckets of one rank: Megatron's rule for them, and the rank's pieces of them as one region.

Megatron divides each bucket over the data-parallel ranks, so a rank owns one piece of every bucket. If the pieces are
adjacent (one bucket, or one data-parallel rank), the region is a view of Megatron's buffer. If not, fp32 masters have
memory of their own, and a handoff moves the gradients together inside Megatron's buffer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from liver_core.layout import BucketRule, RankShards
from liver_core.state.live_state import LiveState

# `DistributedDataParallel.__init__`: the size of a bucket if the job does not set one.
_DEFAULT_ELEMENTS = 40_000_000
_DEFAULT_ELEMENTS_PER_DP = 1_000_000


def bucket_rule(optimizer: Any) -> BucketRule:
    """The rule by which Megatron cuts the buffer of a live DistributedOptimizer, also in a world of another layout.

    If the job sets no size, Megatron fills in its default, which depends on DP, and does not record that it did. So we
    take a size equal to the default for the default. If that is wrong, `adopt` raises: the next world's buckets differ.
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
    """This rank's part of every bucket as flat views, in bucket order. `data` is "param_data" or "grad_data"."""
    buckets = optimizer.buffers[0].buckets
    return tuple(
        getattr(bucket, data)[part.start : part.stop] for bucket, part in zip(buckets, shards.buckets, strict=True)
    )


def one_view(parts: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Parts of one buffer as one flat view, or None if they are not adjacent."""
    for part, following in pairwise(parts):
        if part.storage_offset() + part.numel() != following.storage_offset():
            return None
    return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))


def region_over(buffer: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The view of a gradient buffer in which a rank's collected pieces lie end to end.

    Adjacent pieces stay in place. Others go to the front of the buffer. It holds other ranks' parts of the first
    buckets, or this rank's own; nobody reads other ranks' parts once gradients are reduced.
    """
    whole = one_view(parts)
    return buffer[: sum(part.numel() for part in parts)] if whole is None else whole


def collect_gradients(live: LiveState) -> None:
    """As a source, before others read the region: move the reduced gradients there. No step until `return_gradients`.

    A piece moves to the front or stays, so moving in ascending order overwrites no piece that still has to move.
    """
    for piece, window in _moves(live):
        _move(piece, window)
    live.collected = True


def return_gradients(live: LiveState) -> None:
    """As a source that keeps its step after all: move collected gradients back, bit for bit."""
    if live.collected:
        spread_gradients(live)


def spread_gradients(live: LiveState) -> None:
    """As a target, before it applies the step: move gradients from the region to Megatron's buckets."""
    for piece, window in reversed(_moves(live)):
        _move(window, piece)
    live.collected = False


def _moves(live: LiveState) -> list[tuple[torch.Tensor, torch.Tensor]]:
    windows = live.regions["grad"].split([piece.numel() for piece in live.gradients])
    return list(zip(live.gradients, windows, strict=True))


def _move(source: torch.Tensor, target: torch.Tensor) -> None:
    apart = abs(int(source.storage_offset()) - int(target.storage_offset()))
    if apart:
        # Torch cannot copy between overlapping parts.
        target.copy_(source.clone() if apart < source.numel() else source)
