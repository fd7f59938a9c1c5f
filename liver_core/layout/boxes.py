"""Axis-aligned boxes of one parameter, and how a flat range of a row-major tensor falls into boxes. Pure."""

from dataclasses import dataclass
from math import prod
from operator import sub

from liver_core.layout.layout_error import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The indices start[d] <= i < stop[d] of every dim d; never empty."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or not self.start:
            raise LayoutError("box", f"start {self.start} and stop {self.stop} must have the same dims, at least one")
        for low, high in zip(self.start, self.stop, strict=True):
            if not 0 <= low < high:
                raise LayoutError("box", f"{self} must have 0 <= start < stop in every dim")

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of every dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """What both contain, None when they are disjoint."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        for low, high in zip(start, stop, strict=True):
            if low >= high:
                return None
        return Box(start, stop)

    def shift(self, dim: int, by: int) -> "Box":
        """The same box moved along one dim."""
        start, stop = list(self.start), list(self.stop)
        start[dim] += by
        stop[dim] += by
        return Box(tuple(start), tuple(stop))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{low}:{high}" for low, high in zip(self.start, self.stop, strict=True)) + "]"


def flat_range_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The elements start <= i < stop of a row-major tensor as boxes, in flat order.

    At most 2n-1 boxes for n dims: partial rows at either end, each of them a range of one dim less, and whole rows
    between. Laid end to end, row-major, the boxes give the flat range back. Raises LayoutError outside the tensor.
    """
    if not 0 <= start < stop <= prod(shape):
        raise LayoutError("range", f"{start}:{stop} is not a range of the {prod(shape)} elements of shape {shape}")
    return tuple(_boxes(shape, start, stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    rows = shape[1:]
    row_numel = prod(rows)
    first, head = divmod(start, row_numel)
    last, tail = divmod(stop, row_numel)
    if first == last:
        return _inside_row(first, rows, head, tail)
    found = []
    if head:
        found += _inside_row(first, rows, head, row_numel)
        first += 1
    if first < last:
        found.append(Box((first, *(0 for _ in rows)), (last, *rows)))
    if tail:
        found += _inside_row(last, rows, 0, tail)
    return found


def _inside_row(row: int, rows: tuple[int, ...], start: int, stop: int) -> list[Box]:
    return [Box((row, *box.start), (row + 1, *box.stop)) for box in _boxes(rows, start, stop)]
