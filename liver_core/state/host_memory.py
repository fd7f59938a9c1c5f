"""Regions of a next world that wait in host memory for the cutover, because the device has no room for both worlds.

With a GPU, the host memory is pinned. Without one, device and host are the same memory and the code does the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch

from liver_core.device import DeviceWait, settle
from liver_core.memory.memory_placement import GRAD, WEIGHTS, Area
from liver_core.state.live_state import LiveState
from liver_core.worlds.released_storage import discard, pin, restore


def wait_in_host_memory(live: LiveState, areas: Iterable[Area]) -> int:
    """Give these areas of a world that was built without memory zeroed host memory. Call it before `allocate`.

    Returns bytes of host memory.
    """
    buffers = live.optimizer.buffers
    whole = {WEIGHTS: [each.param_data for each in buffers], GRAD: [each.grad_data for each in buffers]}
    taken = 0
    for area in areas:
        live.hollow = (*live.hollow, *_all_memory(live, area, whole.get(area.name, [])))
        for kind in area.kinds:
            home = live.homes[kind] = live.regions[kind]
            region = live.regions[kind] = home.zeros_like(torch.device("cpu"))
            taken += region.bytes
            region.zero_()  # Memory that is only asked for is none yet.
            if home.device.type == "cuda":
                pin(region.tensors)
    return taken


def _all_memory(live: LiveState, area: Area, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Megatron's buffers of an area, and what its regions have beside them."""
    known = {buffer.untyped_storage()._cdata for buffer in buffers}
    tensors = (tensor for kind in area.kinds for tensor in live.regions[kind].tensors)
    apart = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return [*buffers, *(tensor for storage, tensor in apart.items() if storage not in known)]


def move_in(live: LiveState, note: Callable[[int, int], None]) -> None:
    """Allocate all areas on the device, and move there what waited in host memory.

    Calls `note(device, host)` with the bytes of every allocation and release. Before the call, every endpoint must have
    dropped the regions in host memory. Weights are not moved: the gather that ends the next step fills them.
    """
    filled = Counter[int]()
    for home in (tensor for region in live.homes.values() for tensor in region.tensors):
        filled[home.untyped_storage()._cdata] += home.numel()
    for tensor in live.hollow:
        note(restore([tensor]), 0)
        if filled[tensor.untyped_storage()._cdata] != tensor.numel():
            with torch.no_grad():
                tensor.zero_()
    live.hollow = ()
    waited = {kind: live.regions[kind] for kind in live.homes}
    for kind, home in live.homes.items():
        home.copy_(waited[kind], non_blocking=True)
    settle(DeviceWait.MOVED_IN, live.device)
    live.regions |= live.homes
    live.homes.clear()
    note(0, -discard(tensor for region in waited.values() for tensor in region.tensors))
