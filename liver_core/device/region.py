"""All that a rank holds of one kind of state: elements numbered from 0, in one or more pieces of memory.

Plans, tiles, certificates and rings name elements by these numbers. Which memory lies behind a number is known here and
to whoever moves bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch

_ALIGN_BYTES = 256
"""Where memory of one allocation changes its dtype, the next piece begins at a multiple of this, as torch allocates."""


class RegionError(ValueError):
    """Elements that are not in a region, or not in one piece of it. The text has the numbers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements start <= i < stop of a region. `tensor` is flat, contiguous and has exactly these."""

    start: int
    stop: int
    tensor: torch.Tensor


class Region:
    """`pieces` ascend from 0 without gaps and lie on one `device`. No piece could be joined with the next."""

    __slots__ = ("_starts", "numel", "pieces")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Over flat contiguous tensors, one after another; no bytes are copied. What is adjacent in one storage and of
        one dtype becomes one piece. Raises RegionError for any other tensor, for none, and for several devices."""
        found: list[Piece] = []
        for tensor in _joined(tensors):
            start = found[-1].stop if found else 0
            found.append(Piece(start, start + tensor.numel(), tensor))
        if not found:
            raise RegionError("a region needs at least one tensor")
        if len(devices := {piece.tensor.device for piece in found}) > 1:
            raise RegionError(f"pieces lie on {', '.join(sorted(map(str, devices)))}; a region lies on one device")
        self.pieces = tuple(found)
        self.numel = found[-1].stop
        self._starts = [piece.start for piece in found]

    @staticmethod
    def zeros(parts: Iterable[tuple[int, torch.dtype]], device: torch.device) -> Region:
        """Zeroed memory of its own, in one allocation. `parts`: elements and their dtype, one after another."""
        runs = [(dtype, sum(numel for numel, _ in run)) for dtype, run in groupby(parts, key=lambda part: part[1])]
        if len(runs) == 1:
            ((dtype, numel),) = runs
            return Region([torch.zeros(numel, dtype=dtype, device=device)])
        starts, size = [], 0
        for dtype, numel in runs:
            starts.append(size)
            size += -(-numel * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        whole = torch.zeros(size, dtype=torch.uint8, device=device)
        return Region(
            whole[start : start + numel * dtype.itemsize].view(dtype)
            for start, (dtype, numel) in zip(starts, runs, strict=True)
        )

    def zeros_like(self, device: torch.device | None = None) -> Region:
        """The same elements of the same dtypes in zeroed memory of its own, on `device` or where these are."""
        return Region.zeros(
            ((piece.stop - piece.start, piece.tensor.dtype) for piece in self.pieces), device or self.device
        )

    @property
    def device(self) -> torch.device:
        return self.pieces[0].tensor.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Of the pieces."""
        return tuple(piece.tensor for piece in self.pieces)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def piece_at(self, element: int) -> Piece:
        """The piece that holds it. Raises RegionError."""
        if not 0 <= element < max(self.numel, 1):
            raise RegionError(f"element {element} is not in a region of {self.numel}")
        return self.pieces[bisect_right(self._starts, element) - 1]

    def window(self, start: int, stop: int) -> torch.Tensor:
        """A view of elements start <= i < stop. Raises RegionError where they are in no piece or in several."""
        piece = self.piece_at(start)
        if not start <= stop <= piece.stop:
            raise RegionError(
                f"elements {start} to {stop} do not lie in one piece: it has {piece.start} to {piece.stop}"
            )
        return piece.tensor[start - piece.start : stop - piece.start]

    def over(self, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Elements start <= i < stop as (first, one past the last, view), cut where pieces end. Raises RegionError."""
        while start < stop:
            end = min(stop, self.piece_at(start).stop)
            yield start, end, self.window(start, end)
            start = end

    def copy_(self, other: Region, *, non_blocking: bool = False) -> None:
        """All elements of `other`, which must have as many, however it is cut. Casts where dtypes differ."""
        if other.numel != self.numel:
            raise RegionError(f"a region of {other.numel} elements is copied to one of {self.numel}")
        with torch.no_grad():
            for piece in other.pieces:
                for start, stop, here in self.over(piece.start, piece.stop):
                    here.copy_(piece.tensor[start - piece.start : stop - piece.start], non_blocking=non_blocking)

    def zero_(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors:
                tensor.zero_()

    def __repr__(self) -> str:
        return f"Region({self.numel} elements, {len(self.pieces)} pieces, {self.device})"


AnyRegion: TypeAlias = Region | torch.Tensor
"""A flat tensor is a region of one piece."""


def dtype_name(dtype: torch.dtype) -> str:
    """As manifests and addresses write it: "float32"."""
    return str(dtype).removeprefix("torch.")


def as_region(memory: AnyRegion) -> Region:
    """Raises RegionError for a tensor that is not flat and contiguous."""
    return memory if isinstance(memory, Region) else Region([memory])


def _joined(tensors: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Neighbours in memory as one view. What is empty is left out, unless all is."""
    made: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            shown = f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            raise RegionError(f"must be flat and contiguous, has {shown}")
        if made and not tensor.numel():
            continue
        if made and (not made[-1].numel() or _follows(made[-1], tensor)):
            held = made.pop()
            tensor = held.as_strided((held.numel() + tensor.numel(),), (1,)) if held.numel() else tensor
        made.append(tensor.detach())
    return made


def _follows(tensor: torch.Tensor, following: torch.Tensor) -> bool:
    return (
        tensor.dtype == following.dtype
        and tensor.untyped_storage()._cdata == following.untyped_storage()._cdata
        and tensor.storage_offset() + tensor.numel() == following.storage_offset()
    )
