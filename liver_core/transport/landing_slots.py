"""Where reads of a peer's GPU land whose target waits in host memory.

UCX reads device memory into device memory and host memory into host memory without the peer's help, and neither into
the other (UCX 1.23 with cuda_ipc and cma, on an H100: refused where emulation is off). So such a read lands in a slot
on this rank's own device, and goes on from there to its target.
"""

from __future__ import annotations

import numpy as np
import torch

from liver_core.device import DeviceWait, settle
from liver_core.device.landed import flush_landed
from liver_core.memory.overheads import LANDING_BYTES
from liver_core.transport.regions import RegionBytes, Table

SLOTS = 2
SLOT_BYTES = LANDING_BYTES // SLOTS
BATCH_BYTES_MAX = SLOT_BYTES // 2
"""A batch is less than twice its limit."""
_COPIED_ALONE_MAX = 64
"""So many runs are copied one by one; more come over as one, and the host spreads them."""


class LandingSlots:
    """`memory`: uint8 of SLOTS * SLOT_BYTES on `device`. One thread uses it."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(SLOTS * SLOT_BYTES, dtype=torch.uint8, device=device)
        self._free = list(range(SLOTS))
        self._spread: torch.Tensor | None = None

    def take(self) -> int | None:
        """A free slot; None while all are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Nothing lands in it any more."""
        self._free.append(slot)

    def packed(self, slot: int, table: Table) -> np.ndarray:
        """uint64 (runs, 3) of address, bytes, device: the runs of `table` one behind the other in this slot."""
        rows = np.empty((len(table), 3), dtype=np.uint64)
        rows[:, 0] = self._starts(table) + (self.memory.data_ptr() + slot * SLOT_BYTES)
        rows[:, 1], rows[:, 2] = table[:, 2], max(self.memory.get_device(), 0)
        return rows

    def unload(self, slot: int, table: Table, target: RegionBytes) -> None:
        """Copy what landed to where `table` wants it in `target`, in host memory. It is there afterwards."""
        device, starts = self.memory.device, self._starts(table)
        flush_landed(device)
        landed = self.memory[slot * SLOT_BYTES :][: int(table[:, 2].sum())]
        places = zip(starts, target.located(table[:, 1:]), strict=True)
        if len(table) <= _COPIED_ALONE_MAX:
            for start, (piece, at, length) in places:
                target.views[piece][at : at + length].copy_(landed[start : start + length], non_blocking=True)
            settle(DeviceWait.LANDED, device)
            return
        if self._spread is None:
            self._spread = torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._spread[: len(landed)].copy_(landed, non_blocking=True)
        settle(DeviceWait.LANDED, device)
        whole, spread = [view.numpy() for view in target.views], self._spread.numpy()
        for start, (piece, at, length) in places:
            whole[piece][at : at + length] = spread[start : start + length]

    def _starts(self, table: Table) -> np.ndarray:
        return np.cumsum(table[:, 2]) - table[:, 2]
