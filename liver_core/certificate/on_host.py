"""The sums of a region in host memory, by numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from liver_core.certificate.mixing import MASK, PAIR_BYTES, ROUNDS, WEYL
from liver_core.certificate.slabs import Slab

CHUNK = 16384
"""Words hashed at a time: three arrays of 128 KiB stay in the L2 cache while ten passes run over them."""
_ROUNDS = tuple((np.uint64(factor), np.uint64(shift)) for factor, shift in ROUNDS)


def host_totals(pieces: Sequence[torch.Tensor], slabs: Sequence[Slab], keys: Sequence[int]) -> list[int]:
    """The sum of each parameter modulo 2^64, by its index in `keys`. `slabs`: of flat pieces, in pairs where they say
    so; a piece whose elements are not of 4 bytes has none in pairs."""
    bits = [piece.view(torch.uint8).numpy().view(f"u{piece.element_size()}") for piece in pieces]
    pairs = [each[: len(each) // 2 * 2].view(np.uint64) if 2 * each.itemsize == PAIR_BYTES else each for each in bits]
    scratch = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    totals = [0] * len(keys)
    with np.errstate(over="ignore"):
        for slab in slabs:
            words = (pairs if slab.paired else bits)[slab.piece]
            for values, positions in _chunks(slab, words, keys[slab.index], scratch[0]):
                totals[slab.index] += _mixed_sum(values, positions, scratch[1])
    return [total & MASK for total in totals]


def _chunks(slab: Slab, bits: np.ndarray, key: int, room: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Bits and keyed positions of at most CHUNK elements at a time; the positions live in `room`."""
    first = key + slab.start * WEYL
    if slab.rows > 1 and slab.width <= CHUNK // 2:
        rows_at_once = CHUNK // slab.width
        row_step = np.arange(rows_at_once, dtype=np.uint64) * np.uint64(slab.stride * WEYL & MASK)
        for row in range(0, slab.rows, rows_at_once):
            count = min(rows_at_once, slab.rows - row)
            base = row_step[:count] + np.uint64((first + row * slab.stride * WEYL) & MASK)
            positions = room[: count * slab.width]
            np.add(base[:, None], _ramp()[: slab.width], out=positions.reshape(count, slab.width))
            at = slab.offset + row * slab.width
            yield bits[at : at + len(positions)], positions
        return
    for row in range(slab.rows):
        for column in range(0, slab.width, CHUNK):
            positions = room[: min(CHUNK, slab.width - column)]
            base = np.uint64((first + (row * slab.stride + column) * WEYL) & MASK)
            np.add(_ramp()[: len(positions)], base, out=positions)
            at = slab.offset + row * slab.width + column
            yield bits[at : at + len(positions)], positions


def _mixed_sum(values: np.ndarray, positions: np.ndarray, room: np.ndarray) -> int:
    """Sum of a splitmix of position and bits. The mix is one to one, so that no single change can go unseen."""
    mixed = room[: len(positions)]
    np.bitwise_xor(values, positions, out=mixed)
    for factor, shift in _ROUNDS:
        np.multiply(mixed, factor, out=mixed)
        np.right_shift(mixed, shift, out=positions)
        np.bitwise_xor(mixed, positions, out=mixed)
    return int(np.add.reduce(mixed))


@cache
def _ramp() -> np.ndarray:
    return np.arange(CHUNK, dtype=np.uint64) * np.uint64(WEYL)
