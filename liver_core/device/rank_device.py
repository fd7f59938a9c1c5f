"""Which device a rank uses: its first visible GPU, or the CPU. Which are visible: `liver_core.gpu_environment`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_CPU = torch.device("cpu")


def own_device() -> torch.device:
    """Where this process trains: its first visible GPU, or the CPU. Starts no CUDA by itself."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else _CPU


def own_gpu() -> str:
    """The name of the GPU on which this process trains, which no other GPU of any machine has. Empty on the CPU."""
    return "" if own_device().type == "cpu" else str(torch.cuda.get_device_properties(0).uuid)


def on_device(batch: Any) -> Any:
    """A batch where this process trains: a tensor, or lists, tuples and mappings of them at any depth; what else it
    holds stays as it is. Copied from pinned memory, so that the host does not wait for the device."""
    match batch:
        case torch.Tensor():
            device = own_device()
            is_there = device.type == "cpu" or batch.device.type != "cpu"
            return batch if is_there else batch.pin_memory().to(device, non_blocking=True)
        case Mapping():
            return {name: on_device(part) for name, part in batch.items()}
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*map(on_device, batch))
        case tuple() | list():
            return type(batch)(map(on_device, batch))
    return batch
