"""Which device a rank uses, and the environment in which CUDA must start for it.

CUDA keeps the current device for each thread and begins with 0. So a rank's own GPU comes first in the list of visible
ones: it is device 0 in every thread, and its peers' GPUs stay visible, which reads between processes need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

_CPU = torch.device("cpu")


class DeviceRefused(RuntimeError):
    """A setting with which this job must not run on a GPU. The text names it and what to change."""


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


def rank_environment(slot: int, visible: Sequence[str]) -> dict[str, str]:
    """What a rank of `slot` must find in its environment when it starts. `visible`: the node's GPUs, in slot order.

    More slots than GPUs share them, in turn. Nothing on a node without GPUs.
    """
    if not visible:
        return {}
    at = slot % len(visible)
    return {"CUDA_VISIBLE_DEVICES": ",".join((*visible[at:], *visible[:at]))}


def visible_gpus(environment: Mapping[str, str], present: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that a node offers: those that its environment names, otherwise all `present`."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(present)
    # CUDA itself stops reading at the first entry that is no device.
    found = []
    for entry in (entry.strip() for entry in named.split(",")):
        if not entry or entry == "-1":
            break
        found.append(entry)
    return tuple(found)


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise DeviceRefused for a setting that would end a job with handoffs on a GPU, or read it wrongly."""
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise DeviceRefused(
            "CUDA_LAUNCH_BLOCKING: is set; with two worlds in a process two threads would wait for each other's "
            "collectives for ever. Unset it"
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = environment.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in settings:
            raise DeviceRefused(
                f"{name}: expandable_segments is True; such memory cannot be opened by another process, so state could "
                "not be read. Leave it out, or set expandable_segments:False"
            )


def fork_problem() -> str:
    """Why a fork of this process could not use CUDA; empty if it can. Asking starts nothing."""
    if torch.cuda.is_initialized():
        return "CUDA was started in the zygote by a preloaded module, and no fork of it could use a GPU"
    return ""
