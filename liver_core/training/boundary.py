"""The step boundary: one tiny all-reduce in which every rank of a world agrees on what happens next.

It runs at every step, handoff or not: a collective that only some ranks enter deadlocks. A second one sums what the
step gave. Both are over the whole world.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from liver_core.handoff.boundary import Agreement, agreed, boundary_pair
from liver_core.training.job import StepResult

_DIGEST_BITS = 22
_DIGEST_MASK = (1 << _DIGEST_BITS) - 1


def agree(word: int, group: dist.ProcessGroup) -> Agreement | None:
    """What all ranks of the world asked for with one voice at this boundary, or None; the same on every rank.

    `word` is `liver_core.handoff.boundary.pack(...)` of this rank's greatest wish. Raises RuntimeError when a rank of
    the world is gone.
    """
    pair = torch.tensor(boundary_pair(word), dtype=torch.int64)
    dist.all_reduce(pair, op=dist.ReduceOp.MIN, group=group)
    low, negative_high = pair.tolist()
    return agreed(low, -negative_high)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """One step over the whole world: mean loss over micro-batches, tokens, digest of the sample ids it used."""

    loss: float
    tokens: int
    sample_digest: int


def total(result: StepResult, digest_part: int, group: dist.ProcessGroup) -> StepTotals:
    """Sum what the ranks learned; the 64-bit digest travels as three 22-bit numbers, exact in float64 to 2^31 ranks."""
    parts = [(digest_part >> shift) & _DIGEST_MASK for shift in (0, _DIGEST_BITS, 2 * _DIGEST_BITS)]
    values = torch.tensor([result.loss_sum, result.loss_count, result.tokens, *parts], dtype=torch.float64)
    dist.all_reduce(values, group=group)
    loss_sum, count, tokens, *sums = values.tolist()
    digest = sum(int(part) << (index * _DIGEST_BITS) for index, part in enumerate(sums)) & ((1 << 64) - 1)
    return StepTotals(loss_sum / count if count else float("nan"), int(tokens), digest)
