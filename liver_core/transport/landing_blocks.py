"""Where bytes from sockets land that cannot be received in their target: blocks of host memory, and how one is spread
over a target on the host or a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from liver_core.device import DeviceWait, Event, await_event, is_host, mark
from liver_core.transport.regions import RegionBytes, Table, sliceable
from liver_core.transport.strides import Strided, strided

COPIES_MAX = 64
"""So many strided copies are queued one by one. Of more, those of short runs are made as one."""
SHORT_BYTES = 32 << 10
INDEXED_MAX = 1 << 19
"""Elements copied by one index, which takes 8 bytes for each, a few times over."""


class LandingBlocks:
    """Of `size` bytes each; pinned where the first target is a GPU's. One thread uses them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._back: deque[tuple[torch.Tensor, torch.device, Event]] = deque()

    def take(self, device: torch.device) -> torch.Tensor:
        """uint8 on the host, for bytes that go to `device`. It is one of those given back if its bytes are there, or if
        two are under way."""
        if self._back and (len(self._back) > 1 or self._back[0][2].passed()):
            block, towards, event = self._back.popleft()
            await_event(DeviceWait.LANDED, towards, event)
            return block
        return torch.empty(self._size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def give_back(self, block: torch.Tensor, device: torch.device) -> None:
        """All that this thread has queued by now is all that reads it."""
        self._back.append((block, device, mark(device)))

    def clear(self) -> None:
        self._back.clear()


def spread(block: torch.Tensor, target: RegionBytes, table: Table) -> None:
    """Copy bytes that lie one run behind the other in host memory to where `table` wants them. On a device they are
    there once it has done what this thread queued; until then the block stays as it is."""
    if is_host(target.device):
        ours, theirs = sliceable(target, block)
        at = 0
        for piece, start, length in target.located(table[:, 1:]):
            ours[piece][start : start + length] = theirs[at : at + length]
            at += length
        return
    landed = block[: int(table[:, 2].sum())].to(target.device, non_blocking=True)
    pieces, starts, lengths = target.placed(table[:, 1:])
    packed = np.cumsum(lengths) - lengths
    found = strided(starts, lengths, pieces)
    is_short = np.zeros(len(table), dtype=bool)
    for run in found:
        if len(found) > COPIES_MAX and run.bytes < SHORT_BYTES:
            is_short[run.first : run.first + run.runs] = True
        else:
            _copy_rows(landed[int(packed[run.first]) :], target.views[pieces[run.first]], run)
    for piece in np.unique(pieces[is_short]).tolist():
        rows = np.flatnonzero(is_short & (pieces == piece))
        _copy_indexed(landed, target.views[piece], packed[rows], starts[rows], lengths[rows])


def _copy_rows(landed: torch.Tensor, view: torch.Tensor, run: Strided) -> None:
    rows = view.as_strided((run.rows, run.length), (run.stride, 1), int(view.storage_offset()) + run.start)
    rows.copy_(landed[: run.bytes].view(run.rows, run.length))


def _copy_indexed(
    landed: torch.Tensor, view: torch.Tensor, packed: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> None:
    """Many short runs at once, by elements as large as all of them allow. Packed at one place, at another in `view`."""
    odd = int(np.bitwise_or.reduce(np.concatenate([packed, starts, lengths]))) | int(view.storage_offset()) | 8
    size = odd & -odd
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    ours, theirs = (each[: len(each) // size * size].view(dtype) for each in (view, landed))
    counts = lengths // size
    for part in _parts(counts):
        total = int(counts[part].sum())
        columns = np.stack([starts[part] // size, packed[part] // size, np.cumsum(counts[part]) - counts[part]])
        to, origin, before = (
            torch.from_numpy(columns)
            .to(view.device)
            .repeat_interleave(torch.from_numpy(counts[part]).to(view.device), dim=1, output_size=total)
        )
        steps = torch.arange(total, device=view.device) - before
        ours.index_copy_(0, to + steps, theirs[origin + steps])


def _parts(counts: np.ndarray) -> Sequence[slice]:
    """Consecutive runs of INDEXED_MAX elements together, or a little more."""
    group = (np.cumsum(counts) - counts) // INDEXED_MAX
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(counts)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]
