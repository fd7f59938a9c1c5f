"""What a certificate is made of: the boxes of a region, cut so that summing them needs no more thought."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from hashlib import blake2b

import numpy as np
import torch

from liver_core.certificate.batches import Batch, batches_of
from liver_core.certificate.mixing import MASK, PAIR_BYTES
from liver_core.certificate.on_device import device_totals
from liver_core.certificate.on_host import host_totals
from liver_core.certificate.slabs import Slab, in_pairs, slabs_of
from liver_core.device import is_host
from liver_core.layout import ResidentBox


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
        self._by_element = tuple(whole)
        self._by_pair = tuple(in_pairs(slab) if self._paired[slab.index] else slab for slab in whole)
        self._batches: dict[bool, tuple[Batch, ...]] = {}
        """By whether they are pairs; made where a region lies on a device."""

    def get_ready(self, regions: Iterable[torch.Tensor]) -> None:
        """Make now what the first sums of such regions would have to make, in the pause perhaps. A region need not have
        its memory yet."""
        for region in regions:
            if not is_host(region.device):
                self._batches_of(region)

    def sums(self, region: torch.Tensor, kind: str) -> np.ndarray:
        """uint64 sum of each parameter over the boxes of this plan, zero where it has none.

        `region` is flat and contiguous, of any dtype with 1, 2, 4 or 8 bytes. On a GPU it stays there: the caller's
        stream is waited for, and one number for each parameter is read. Raises ValueError for a region that is too
        short or not flat.
        """
        if region.dim() != 1 or not region.is_contiguous():
            raise ValueError(f"region must be flat and contiguous, has shape {tuple(region.shape)}")
        if region.numel() < self._region_numel_least:
            raise ValueError(
                f"region of {kind!r} has {region.numel()} elements, boxes reach {self._region_numel_least}"
            )
        keys = _keys(self.parameters, kind)
        if is_host(region.device):
            totals = host_totals(region.detach(), self._slabs_of(region), keys)
        else:
            totals = device_totals(region.detach(), self._batches_of(region), keys)
        counted = zip(totals, self._times, strict=True)
        return np.array([total * times & MASK for total, times in counted], dtype=np.uint64)

    def _slabs_of(self, region: torch.Tensor) -> tuple[Slab, ...]:
        return self._by_pair if _is_paired(region) else self._by_element

    def _batches_of(self, region: torch.Tensor) -> tuple[Batch, ...]:
        paired = _is_paired(region)
        if paired not in self._batches:
            self._batches[paired] = batches_of(self._slabs_of(region))
        return self._batches[paired]


def _is_paired(region: torch.Tensor) -> bool:
    return 2 * region.element_size() == PAIR_BYTES


@cache
def _keys(parameters: tuple[str, ...], kind: str) -> tuple[int, ...]:
    names = (f"{kind}\0{name}".encode() for name in parameters)
    return tuple(int.from_bytes(blake2b(name, digest_size=8).digest(), "little") for name in names)
