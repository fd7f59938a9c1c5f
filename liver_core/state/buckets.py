"""Gradient buckets of one rank: Megatron's rule for them, and the rank's parts of them.

Megatron divides each bucket over the data-parallel ranks, so a rank owns one part of every bucket.
"""

from __future__ import annotations

import torch

from liver_core.layout import BucketRule, RankShards
from liver_core.state.optimizer_chain import OptimizerChain

# `DistributedDataParallel.__init__`: the size of a bucket if the job does not set one.
_DEFAULT_ELEMENTS = 40_000_000
_DEFAULT_ELEMENTS_PER_DP = 1_000_000


def bucket_rule(chain: OptimizerChain) -> BucketRule:
    """The rule by which Megatron cuts the buffers of live optimizers, also in a world of another layout.

    If the job sets no size, Megatron fills in its default, which depends on DP, and does not record that it did. So we
    take a size equal to the default for the default. If that is wrong, `adopt` raises: the next world's buckets differ.
    """
    config = chain.ddp_config
    size, padded = config.bucket_size, config.pad_buckets_for_high_nccl_busbw
    dp = chain.model.dp_group.size()
    if size != max(_DEFAULT_ELEMENTS, _DEFAULT_ELEMENTS_PER_DP * dp):
        return BucketRule(elements_max=size, high_bandwidth_padding=padded)
    return BucketRule(
        elements_max=_DEFAULT_ELEMENTS,
        elements_max_per_dp=_DEFAULT_ELEMENTS_PER_DP,
        high_bandwidth_padding=padded,
    )


def owned_parts(chain: OptimizerChain, data: str, shards: RankShards) -> list[torch.Tensor]:
    """This rank's part of every bucket as flat views, buffer after buffer. `data` is "param_data" or "grad_data"."""
    buckets = [bucket for buffer in chain.buffers for bucket in buffer.buckets]
    return [getattr(bucket, data)[part.start : part.stop] for bucket, part in zip(buckets, shards.buckets, strict=True)]
