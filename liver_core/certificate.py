"""Position-keyed hash of training state: the same for every layout, different for any misplaced or changed element.

Sums over ranks modulo 2^64 give one number for each parameter and kind. It proves that the data plane moved what the
mapping said, not that the mapping is right: both sides use the same boxes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import product
from math import prod

import numpy as np
import torch

from liver_core.layout import ResidentBox

MASK = 2**64 - 1
CHUNK = 16384
"""Words hashed at a time: three arrays of 128 KiB stay in the L2 cache while ten passes run over them."""
PAIR_BYTES = 8

WEYL = 0x9E3779B97F4A7C15
MIX_FIRST = np.uint64(0xBF58476D1CE4E5B9)
MIX_SECOND = np.uint64(0x94D049BB133111EB)
SHIFT_FIRST, SHIFT_SECOND = np.uint64(32), np.uint64(29)
"""Constants of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)."""


@dataclass(frozen=True, slots=True)
class _Slab:
    """`rows` rows of `width` elements: contiguous in the region, `stride` apart in the flat global parameter. Where
    `paired`, two elements count as one in all of these numbers."""

    index: int
    paired: bool
    offset: int
    start: int
    rows: int
    width: int
    stride: int


class CertificatePlan:
    """Where every element of a region lies in its global parameter; made ahead, so that the pause only does sums.

    `boxes` must not overlap. Where several ranks hold the same (tensor-parallel replicas) sums over all of them depend
    on the layout: the caller counts on one rank, and says with `times` as how many. Memory: one small record for each
    box, none for elements.
    """

    def __init__(
        self,
        boxes: Iterable[ResidentBox],
        shapes: Mapping[str, tuple[int, ...]],
        times: Mapping[str, int] | None = None,
        paired: Collection[str] = (),
    ) -> None:
        """`shapes` are global; sums come in its order, multiplied by `times`, which is 1 for a parameter not named.

        Two 4-byte elements of a `paired` parameter are hashed as one word, in half the time: all ranks that are to be
        compared must name the same ones (`liver_core.layout.paired_parameters`). Raises ValueError for a box outside
        its parameter, or with half a pair in it.
        """
        self.parameters = tuple(shapes)
        self._times = [1 if times is None else times.get(name, 1) for name in shapes]
        index = {name: at for at, name in enumerate(self.parameters)}
        whole = [slab for box in boxes for slab in _slabs(box, shapes[box.parameter], index[box.parameter])]
        self.elements = sum(slab.rows * slab.width for slab in whole)
        self._region_numel_least = max((slab.offset + slab.rows * slab.width for slab in whole), default=0)
        self._paired = tuple(name in paired for name in self.parameters)
        self._by_element = tuple(whole)
        self._by_pair = tuple(_in_pairs(slab) if self._paired[slab.index] else slab for slab in whole)

    def sums(self, region: torch.Tensor, kind: str) -> np.ndarray:
        """uint64 sum of each parameter over the boxes of this plan, zero where it has none.

        `region` is flat and contiguous, of any dtype with 1, 2, 4 or 8 bytes. On a GPU it is copied to the host first.
        """
        if region.numel() < self._region_numel_least:
            raise ValueError(
                f"region of {kind!r} has {region.numel()} elements, boxes reach {self._region_numel_least}"
            )
        bits = _bits(region)
        pairs = bits[: len(bits) // 2 * 2].view(np.uint64) if 2 * bits.itemsize == PAIR_BYTES else bits
        keys, scratch = _keys(self.parameters, kind), (np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64))
        totals = [0] * len(self.parameters)
        with np.errstate(over="ignore"):
            for slab in self._by_element if pairs is bits else self._by_pair:
                words = pairs if slab.paired else bits
                for values, positions in _chunks(slab, words, keys[slab.index], scratch[0]):
                    totals[slab.index] += _mixed_sum(values, positions, scratch[1])
        counted = zip(totals, self._times, strict=True)
        return np.array([total * times & MASK for total, times in counted], dtype=np.uint64)


def chained_sums(sums: Mapping[int, int]) -> int:
    """One number over the sums of several steps, each weighted by its number: which step had which sum counts.

    Linear modulo 2^64, so that the parts of several ranks add up to the whole.
    """
    return sum((step * WEYL | 1) * part for step, part in sums.items()) & MASK


def _slabs(resident: ResidentBox, shape: tuple[int, ...], index: int) -> Iterator[_Slab]:
    """A box as slabs: dims that it spans whole are folded into the row, the last one left is the row number."""
    box = resident.box
    if len(shape) != len(box.stop) or any(stop > size for stop, size in zip(box.stop, shape, strict=True)):
        raise ValueError(f"box {box} is not inside {resident.parameter!r} of shape {shape}")
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape) - 1
    while inner > 0 and box.stop[inner] - box.start[inner] == shape[inner]:
        inner -= 1
    width = (box.stop[inner] - box.start[inner]) * strides[inner]
    row_dim = inner - 1
    rows = box.stop[row_dim] - box.start[row_dim] if inner else 1
    stride = strides[row_dim] if inner else 0
    corner = sum(box.start[dim] * strides[dim] for dim in range(max(row_dim, 0), inner + 1))
    offset = resident.offset
    outer = [range(box.start[dim], box.stop[dim]) for dim in range(max(row_dim, 0))]
    for position in product(*outer):
        start = corner + sum(at * strides[dim] for dim, at in enumerate(position))
        yield _Slab(index, False, offset, start, rows, width, stride)
        offset += rows * width


def _in_pairs(slab: _Slab) -> _Slab:
    """The same slab counted in pairs. Raises ValueError where a row of it begins or ends inside a pair."""
    if any(number % 2 for number in (slab.offset, slab.start, slab.width, slab.stride)):
        raise ValueError(f"{slab} does not consist of whole pairs")
    return replace(
        slab,
        paired=True,
        offset=slab.offset // 2,
        start=slab.start // 2,
        width=slab.width // 2,
        stride=slab.stride // 2,
    )


def _chunks(slab: _Slab, bits: np.ndarray, key: int, room: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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
    np.multiply(mixed, MIX_FIRST, out=mixed)
    np.right_shift(mixed, SHIFT_FIRST, out=positions)
    np.bitwise_xor(mixed, positions, out=mixed)
    np.multiply(mixed, MIX_SECOND, out=mixed)
    np.right_shift(mixed, SHIFT_SECOND, out=positions)
    np.bitwise_xor(mixed, positions, out=mixed)
    return int(np.add.reduce(mixed))


def _bits(region: torch.Tensor) -> np.ndarray:
    if region.dim() != 1 or not region.is_contiguous():
        raise ValueError(f"region must be flat and contiguous, has shape {tuple(region.shape)}")
    plain = region.detach().cpu().view(torch.uint8).numpy()
    return plain.view(f"u{region.element_size()}")


@cache
def _keys(parameters: tuple[str, ...], kind: str) -> tuple[int, ...]:
    names = (f"{kind}\0{name}".encode() for name in parameters)
    return tuple(int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names)


@cache
def _ramp() -> np.ndarray:
    return np.arange(CHUNK, dtype=np.uint64) * np.uint64(WEYL)
