"""The data cursor: which samples each data-parallel rank takes in each step, in any layout. Pure.

A global batch is always the next `global_batch` sample ids, so each sample is used exactly once, however often the
layout changes. The digest of a step is a sum, so ranks can add their parts in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

from liver_core.layout import Coordinates
from liver_core.training.job import MicroBatch

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DataCursor:
    """`consumed`: samples used by the steps applied so far. `global_batch` is constant for a job's life."""

    consumed: int
    global_batch: int
    micro_batch: int

    def batches(self, dp_rank: int, dp_size: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one data-parallel rank in the step that starts at this cursor.

        Micro-batch k of rank r starts at id consumed + (k * dp_size + r) * micro_batch. This is Megatron's order
        (megatron/training/datasets/data_samplers.py). Raises ValueError if the batch does not divide.
        """
        per_round = self.micro_batch * dp_size
        if self.global_batch % per_round:
            raise ValueError(
                f"global_batch: {self.global_batch} is not a multiple of micro_batch x DP = "
                f"{self.micro_batch} x {dp_size}"
            )
        rounds = self.global_batch // per_round
        starts = (self.consumed + (k * dp_size + dp_rank) * self.micro_batch for k in range(rounds))
        return tuple(MicroBatch(tuple(range(start, start + self.micro_batch))) for start in starts)

    def advanced(self) -> DataCursor:
        """The cursor after one applied step."""
        return DataCursor(self.consumed + self.global_batch, self.global_batch, self.micro_batch)


def digest_part(step: int, batches: tuple[MicroBatch, ...], here: Coordinates) -> int:
    """This rank's part of the step's sample digest; the digest is the sum of all parts modulo 2^64.

    The ranks of one model replica train on the same samples, so only the replica's first rank adds a part.
    """
    if (here.tp, here.pp, here.cp) != (0, 0, 0):
        return 0
    return sum(_mixed(step, sample) for batch in batches for sample in batch.sample_ids) & _MASK


def chained(previous: int, step_digest: int) -> int:
    """Digest of all steps so far. It depends on the order of steps, so it detects a repeated or swapped step."""
    return _splitmix((previous ^ step_digest) & _MASK)


def _mixed(step: int, sample: int) -> int:
    return _splitmix((step * 0x9E3779B97F4A7C15 + sample) & _MASK)


def _splitmix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
