"""Which device a rank uses: its first visible GPU, or the CPU. Which are visible: `liver_core.gpu_environment`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_CPU = torch.device("cpu")


def own_device() -> torch.device:
    """Where this process trains: its first visible GPU, or the CPU. Starts no CUDA by itself."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else _CPU


def own_gpu() -> str:
    """The name of the GPU on which this process trains, which no other GPU of any machine has. Empty on the CPU."""
    return "" if own_device().type == "cpu" else str(torch.cuda.get_device_properties(0).uuid)


def on_device(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch where this process trains. Copied from pinned memory, so that the host does not wait for the device."""
    device = own_device()
    if device.type == "cpu":
        return dict(batch)
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
