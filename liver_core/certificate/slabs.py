"""Where the elements of a box lie in a region and in their global parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from liver_core.layout import ResidentBox


@dataclass(frozen=True, slots=True)
class Slab:
    """`rows` rows of `width` elements: contiguous from `offset` of the region's piece on, `stride` apart in the flat
    global parameter. Where `paired`, two elements count as one in all of these numbers. `piece`: its number."""

    index: int
    paired: bool
    offset: int
    start: int
    rows: int
    width: int
    stride: int
    piece: int = 0


def slabs_of(resident: ResidentBox, shape: tuple[int, ...], index: int) -> Iterator[Slab]:
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
        yield Slab(index, False, offset, start, rows, width, stride)
        offset += rows * width


def in_pairs(slab: Slab) -> Slab:
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
