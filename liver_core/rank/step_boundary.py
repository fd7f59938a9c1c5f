"""The step boundary: one tiny all-reduce in which every rank of a world agrees on what happens next.

It runs at every step, handoff or not: if only some ranks entered a collective, it would deadlock. A second all-reduce
sums the results of the step at the same time. Both span the whole world and go over gloo, in host memory. What they are
made of, and the gradient norm, the host reads from the device before, at once and only here: each read would wait for
all that the device has to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from liver_core.device import read
from liver_core.handoff.ready_tag import Agreement, agreed, boundary_pair
from liver_core.state.optimizer_step import norm_of
from liver_core.training.job import StepResult

_PART_BITS = 22
_PARTS = 3
_PART_MASK = (1 << _PART_BITS) - 1


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """`result`: its loss as a float. `norm`: of the gradients, over the world."""

    result: StepResult
    norm: float


def read_numbers(result: StepResult, squared_norm: torch.Tensor) -> StepNumbers:
    """`squared_norm`: what `start_norm` gave. Waits for what this thread has queued on its device, once."""
    loss = result.loss_sum
    if not isinstance(loss, torch.Tensor) or loss.device != squared_norm.device:
        (squared,) = read(squared_norm.reshape(1))
        return StepNumbers(replace(result, loss_sum=float(loss)), norm_of(squared))
    loss_sum, squared = read(torch.cat([loss.detach().reshape(1).double(), squared_norm.reshape(1).double()]))
    return StepNumbers(replace(result, loss_sum=loss_sum), norm_of(squared))


@dataclass(frozen=True, slots=True)
class Boundary:
    """What the ranks of a world found at one boundary; the same on every rank. `agreement`: the request that all
    showed, None if they differ. `may_step`: whether any rank holds a step lease."""

    agreement: Agreement | None
    may_step: bool


def agree(word: int, group: dist.ProcessGroup, *, has_lease: bool = True) -> Boundary:
    """One boundary. `word` is `liver_core.handoff.ready_tag.pack(...)` of this rank's most urgent request, `has_lease`
    whether it holds a step lease. Raises RuntimeError if a rank of the world is gone.
    """
    shown = torch.tensor([*boundary_pair(word), -int(has_lease)], dtype=torch.int64)
    dist.all_reduce(shown, op=dist.ReduceOp.MIN, group=group)
    low, negative_high, negative_lease = shown.tolist()
    return Boundary(agreed(low, -negative_high), may_step=negative_lease < 0)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """One step over the whole world: mean loss over micro-batches, tokens, digest of the sample ids it used.

    `chain`: the sum modulo 2^64 over the gradients streamed before this step (`certificate.chained_sums`). None unless
    every rank knew its part. `has_loss`: whether any rank computed one; `loss` is NaN if none did. `norm`: of the
    gradients, None where it is not known.
    """

    loss: float
    tokens: int
    sample_digest: int
    chain: int | None = None
    has_loss: bool = True
    norm: float | None = None


class Totalling:
    """A sum over the world, in progress. Call `wait` once."""

    def __init__(self, values: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._values = values
        self._ranks = dist.get_world_size(group)
        self._work = dist.all_reduce(values, group=group, async_op=True)

    def wait(self) -> StepTotals:
        """The totals. Raises RuntimeError if a rank of the world is gone."""
        assert self._work is not None
        self._work.wait()
        loss_sum, count, tokens, chains, *sums = self._values.tolist()
        return StepTotals(
            loss_sum / count if count else math.nan,
            int(tokens),
            _joined(sums[:_PARTS]),
            _joined(sums[_PARTS:]) if chains == self._ranks else None,
            has_loss=count > 0,
        )


def start_total(result: StepResult, digest_part: int, group: dist.ProcessGroup, chain: int | None = None) -> Totalling:
    """Start the sum of all ranks' results. `digest_part` and `chain` are this rank's 64-bit parts; None: unknown.

    They are sent as 22-bit numbers. Sums of these are exact in float64 for up to 2^31 ranks.
    """
    known = [float(result.loss_sum), result.loss_count, result.tokens, chain is not None]
    parts = [*_parts(digest_part), *_parts(chain or 0)]
    return Totalling(torch.tensor([*known, *parts], dtype=torch.float64), group)


def meet(group: dist.ProcessGroup) -> None:
    """Return once every rank of the group has come here. Raises RuntimeError if one is gone."""
    dist.all_reduce(torch.zeros(1, device="cpu"), group=group)


def _parts(word: int) -> list[int]:
    return [(word >> shift) & _PART_MASK for shift in range(0, _PARTS * _PART_BITS, _PART_BITS)]


def _joined(sums: list[float]) -> int:
    return sum(int(part) << (index * _PART_BITS) for index, part in enumerate(sums)) & ((1 << 64) - 1)
