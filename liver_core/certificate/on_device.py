"""The sums of a region on the device that holds it, by torch: the same numbers, and only they cross to the host.

int64 stands for uint64: sums and products of both wrap alike modulo 2^64, and a shift is made a logical one by a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from liver_core.certificate.mixing import MASK, PAIR_BYTES, ROUNDS, WEYL
from liver_core.certificate.slabs import Slab
from liver_core.device import read
from liver_core.memory.overheads import CERTIFICATE_WORDS

_UNSIGNED = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF), 8: (torch.int64, 0)}
"""By bytes of an element: as what its bits are read, and what is left of them once they have become an int64."""


def device_totals(
    region: torch.Tensor, slabs: Sequence[Slab], keys: Sequence[int], words_at_once: int = CERTIFICATE_WORDS
) -> list[int]:
    """As `on_host.host_totals`. Waits for the device once, at the end, on the current stream.

    Beside the region three tensors of `words_at_once` words are made, five where the rows are short.
    """
    kind, kept = _UNSIGNED[region.element_size()]
    bits = region.view(kind)
    pairs = _pairs(region) if any(slab.paired for slab in slabs) else bits
    totals = torch.zeros(len(keys), dtype=torch.int64, device=region.device)
    widest = max((min(slab.rows * slab.width, words_at_once) for slab in slabs), default=0)
    ramp = torch.arange(widest, dtype=torch.int64, device=region.device) * _signed(WEYL)
    for slab in slabs:
        for values, positions in _chunks(slab, pairs if slab.paired else bits, keys[slab.index], ramp, words_at_once):
            words = values.to(torch.int64)
            if kept and not slab.paired:
                words &= kept
            # A copy serves as scratch memory; what the region itself holds is only read.
            scratch = torch.empty_like(positions) if words is values else words
            totals[slab.index] += _mixed_sum(words, positions, scratch)
            # Gone before the next ones are made.
            del values, words, positions, scratch
    return [total & MASK for total in read(totals)]


def _pairs(region: torch.Tensor) -> torch.Tensor:
    """The region's words of two elements. One that begins inside such a word of its memory is copied."""
    assert 2 * region.element_size() == PAIR_BYTES
    even = region[: region.numel() // 2 * 2]
    return (even.clone() if even.storage_offset() % 2 else even).view(torch.int64)


def _chunks(
    slab: Slab, words: torch.Tensor, key: int, ramp: torch.Tensor, most: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bits and keyed positions of about `most` elements at a time, as rows and columns."""
    first = key + slab.start * WEYL
    whole = words[slab.offset : slab.offset + slab.rows * slab.width].view(slab.rows, slab.width)
    columns_at_once, rows_at_once = min(slab.width, most), max(1, most // slab.width)
    row_steps = torch.arange(min(rows_at_once, slab.rows), dtype=torch.int64, device=words.device)
    row_steps *= _signed(slab.stride * WEYL)
    for row in range(0, slab.rows, rows_at_once):
        count = min(rows_at_once, slab.rows - row)
        for column in range(0, slab.width, columns_at_once):
            width = min(columns_at_once, slab.width - column)
            base = row_steps[:count] + _signed(first + (row * slab.stride + column) * WEYL)
            yield whole[row : row + count, column : column + width], base[:, None] + ramp[:width]


def _mixed_sum(words: torch.Tensor, positions: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """As on the host; `positions` and `scratch` are used up."""
    mixed = positions.bitwise_xor_(words)
    for factor, shift in ROUNDS:
        mixed *= _signed(factor)
        torch.bitwise_right_shift(mixed, shift, out=scratch)
        mixed ^= scratch.bitwise_and_(MASK >> shift)
    return mixed.sum()


def _signed(number: int) -> int:
    """The int64 of the same bits."""
    number &= MASK
    return number - 2**64 if number >= 2**63 else number
