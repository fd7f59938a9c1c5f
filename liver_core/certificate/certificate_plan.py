"""What a certificate is made of: the boxes of a region, cut so that summing them needs no more thought."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from typing import TypeAlias

import numpy as np

from liver_core.certificate.batches import Batch, batches_of
from liver_core.certificate.mixing import MASK, PAIR_BYTES
from liver_core.certificate.on_device import device_totals
from liver_core.certificate.on_host import host_totals
from liver_core.certificate.slabs import Slab, in_pairs, slabs_of
from liver_core.device import is_host
from liver_core.device.region import AnyRegion, Region, as_region
from liver_core.layout import ResidentBox

_Form: TypeAlias = tuple[tuple[int, int], ...]
"""How a region is cut: of each piece one past its last element, and bytes per element."""


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
        whole = [slab for box in boxes for slab in slabs_of(box, shapes[box.parameter], index[box.parameter])]
        self.elements = sum(slab.rows * slab.width for slab in whole)
        self._region_numel_least = max((slab.offset + slab.rows * slab.width for slab in whole), default=0)
        self._paired = tuple(name in paired for name in self.parameters)
        counted = [0] * len(self.parameters)
        for slab in whole:
            counted[slab.index] += slab.rows * slab.width
        self.counted = tuple(number * many for number, many in zip(counted, self._times, strict=True))
        """Elements of each parameter that these sums are over; summed over a world they are equal in all layouts."""
        for slab in whole:
            if self._paired[slab.index]:
                in_pairs(slab)
        self._whole = tuple(whole)
        self._placed: dict[_Form, tuple[Slab, ...]] = {}
        self._batches: dict[_Form, tuple[Batch, ...]] = {}
        """By how regions are cut; batches are made where a region lies on a device."""

    def get_ready(self, regions: Iterable[AnyRegion]) -> None:
        """Make now what the first sums of such regions would have to make, in the pause perhaps. A region need not have
        its memory yet."""
        for region in map(as_region, regions):
            self._slabs_of(region)
            if not is_host(region.device):
                self._batches_of(region)

    def sums(self, memory: AnyRegion, kind: str) -> np.ndarray:
        """uint64 sum of each parameter over the boxes of this plan, zero where it has none.

        Pieces may have any dtypes with 1, 2, 4 or 8 bytes. On a GPU the region stays there: the caller's stream is
        waited for, and one number for each parameter is read. Raises ValueError for a region that is too short, that is
        not flat, or that has an end of a piece inside a box.
        """
        region = as_region(memory)
        if region.numel < self._region_numel_least:
            raise ValueError(f"region of {kind!r} has {region.numel} elements, boxes reach {self._region_numel_least}")
        keys = _keys(self.parameters, kind)
        if is_host(region.device):
            totals = host_totals(region.tensors, self._slabs_of(region), keys)
        else:
            totals = device_totals(region.tensors, self._batches_of(region), keys)
        counted = zip(totals, self._times, strict=True)
        return np.array([total * times & MASK for total, times in counted], dtype=np.uint64)

    def _slabs_of(self, region: Region) -> tuple[Slab, ...]:
        form = _form(region)
        if form not in self._placed:
            stops = [stop for stop, _ in form]
            self._placed[form] = tuple(
                self._in_piece(slab, bisect_right(stops, slab.offset), form) for slab in self._whole
            )
        return self._placed[form]

    def _in_piece(self, slab: Slab, piece: int, form: _Form) -> Slab:
        start = form[piece - 1][0] if piece else 0
        stop, itemsize = form[piece]
        if slab.offset + slab.rows * slab.width > stop:
            raise ValueError(f"{slab} does not end in the piece that ends at {stop}")
        placed = replace(slab, offset=slab.offset - start, piece=piece)
        return in_pairs(placed) if self._paired[slab.index] and 2 * itemsize == PAIR_BYTES else placed

    def _batches_of(self, region: Region) -> tuple[Batch, ...]:
        form, slabs = _form(region), self._slabs_of(region)
        if form not in self._batches:
            sizes = sorted({itemsize for _, itemsize in form})
            alike = ([slab for slab in slabs if form[slab.piece][1] == size] for size in sizes)
            self._batches[form] = tuple(batch for some in alike for batch in batches_of(some))
        return self._batches[form]


def _form(region: Region) -> _Form:
    return tuple((piece.stop, piece.tensor.element_size()) for piece in region.pieces)


@cache
def _keys(parameters: tuple[str, ...], kind: str) -> tuple[int, ...]:
    names = (f"{kind}\0{name}".encode() for name in parameters)
    return tuple(int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names)
