"""Where the memory of regions lies, as NIXL wants to be told."""

from __future__ import annotations

from typing import Any

import torch

from liver_core.device.region import AnyRegion, Region


def must_stage(memory: str, target: AnyRegion) -> bool:
    """Whether a read of a peer's `memory` reaches `target` over the stage only."""
    return memory == "VRAM" and memory_of(target) == "DRAM"


def spans(region: Region) -> list[torch.Tensor]:
    """uint8: of each storage the part in which pieces lie, so that what is registered does not grow with the pieces."""
    reach: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for tensor in region.tensors:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        start = int(tensor.storage_offset()) * size
        stop = start + tensor.numel() * size
        _, low, high = reach.get(storage._cdata, (storage, start, stop))
        reach[storage._cdata] = storage, min(low, start), max(high, stop)
    whole: Any = torch.empty(0, dtype=torch.uint8, device=region.device)
    return [whole.new_empty(0).set_(storage, low, (high - low,)) for storage, low, high in reach.values()]


def piece_addresses(region: Region) -> list[int]:
    return [tensor.data_ptr() for tensor in region.tensors]


def memory_of(memory: AnyRegion) -> str:
    """NIXL's name of the kind of memory."""
    return "VRAM" if memory.device.type == "cuda" else "DRAM"


def device_of(memory: AnyRegion) -> int:
    """The number of the device, 0 for the host."""
    return memory.device.index or 0
