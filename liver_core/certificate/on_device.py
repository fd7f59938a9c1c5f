"""The sums of a region on the device that holds it, by torch: the same numbers, and only they cross to the host.

int64 stands for uint64: sums and products of both wrap alike modulo 2^64, and a shift is made a logical one by a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from liver_core.certificate.batches import Batch
from liver_core.certificate.mixing import MASK, PAIR_BYTES, ROUNDS, WEYL
from liver_core.device import read

_UNSIGNED = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF), 8: (torch.int64, 0)}
"""By bytes of an element: as what its bits are read, and what is left of them once they have become an int64."""
_WEYL = np.uint64(WEYL)


def device_totals(pieces: Sequence[torch.Tensor], batches: Sequence[Batch], keys: Sequence[int]) -> list[int]:
    """As `on_host.host_totals`, of slabs that were put together; those of a batch have elements of one size. Waits for
    the device once, at the end, on the current stream.

    Beside the region at most `CERTIFICATE_TENSORS` tensors are made, of as many 64-bit words as the largest batch has.
    """
    device = pieces[0].device
    bits = [piece.view(_UNSIGNED[piece.element_size()][0]) for piece in pieces]
    paired = {run.piece for batch in batches if batch.paired for run in batch.runs}
    pairs = {number: _pairs(pieces[number]) for number in paired}
    totals = torch.zeros(len(keys), dtype=torch.int64, device=device)
    tables = _keyed(batches, keys, device)
    ramp = torch.arange(max((batch.width for batch in batches), default=0), dtype=torch.int64, device=device)
    ramp *= _signed(WEYL)
    for batch, table in zip(batches, tables, strict=True):
        index, bases = _places(batch, table)
        values = _values(batch, pairs if batch.paired else bits)
        kept = _UNSIGNED[values.element_size()][1]
        words = values.to(torch.int64)
        if kept:
            words &= kept
        positions = bases[:, None] + ramp[: batch.width]
        # A copy serves as scratch memory; what the region itself holds is only read.
        scratch = torch.empty_like(positions) if words is values and len(batch.runs) == 1 else words
        del values
        mixed = _mixed(words, positions, scratch)
        if len(batch.runs) == 1:
            totals[batch.runs[0].index] += mixed.sum()
        else:
            totals.index_add_(0, index, mixed.sum(1))
        # Gone before the next ones are made.
        del index, bases, words, positions, scratch, mixed
    return [total & MASK for total in read(totals)]


def _keyed(batches: Sequence[Batch], keys: Sequence[int], device: torch.device) -> Sequence[torch.Tensor]:
    """For each batch int64 (4, runs) on the device: index, keyed position of the first piece, keyed step, count."""
    if not batches:
        return ()
    whole = np.concatenate([batch.table for batch in batches], axis=1)
    with np.errstate(over="ignore"):
        placed = whole[1:3].astype(np.uint64) * _WEYL
        placed[0] += np.array([key & MASK for key in keys], dtype=np.uint64)[whole[0]]
    made = torch.from_numpy(np.stack([whole[0], *placed.view(np.int64), whole[3]])).to(device)
    return made.split([len(batch.runs) for batch in batches], dim=1)


def _places(batch: Batch, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each piece: the index of its parameter (not where all have the same), and its keyed position."""
    index, first, step, count = table
    pieces = batch.pieces
    ordinal = torch.arange(pieces, dtype=torch.int64, device=table.device)
    if len(batch.runs) == 1:
        return index, ordinal.mul_(step).add_(first)
    # Told its size, it does not ask the device.
    run = torch.repeat_interleave(count, output_size=pieces)
    ordinal -= (count.cumsum(0) - count)[run]
    return index[run], ordinal.mul_(step[run]).add_(first[run])


def _values(batch: Batch, words: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> torch.Tensor:
    """(rows, width) of the words of the region's pieces: its own memory where there is one run."""
    parts = [words[run.piece][run.offset : run.offset + run.count * batch.width] for run in batch.runs]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.view(batch.pieces, batch.width)


def _pairs(region: torch.Tensor) -> torch.Tensor:
    """The region's words of two elements. One that begins inside such a word of its memory is copied."""
    assert 2 * region.element_size() == PAIR_BYTES
    even = region[: region.numel() // 2 * 2]
    return (even.clone() if even.storage_offset() % 2 else even).view(torch.int64)


def _mixed(words: torch.Tensor, positions: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """As on the host, of each word; `positions` and `scratch` are used up."""
    mixed = positions.bitwise_xor_(words)
    for factor, shift in ROUNDS:
        mixed *= _signed(factor)
        torch.bitwise_right_shift(mixed, shift, out=scratch)
        mixed ^= scratch.bitwise_and_(MASK >> shift)
    return mixed


def _signed(number: int) -> int:
    """The int64 of the same bits."""
    number &= MASK
    return number - 2**64 if number >= 2**63 else number
