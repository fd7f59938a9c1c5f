"""The environment in which ranks start on a machine with GPUs, and settings with which they must not. Pure.

CUDA keeps the current device for each thread and begins with 0. So a rank's own GPU comes first in the list of visible
ones: it is device 0 in every thread, and its peers' GPUs stay visible, which reads between processes need.
"""

import re
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENDS = "torch would end a rank whose peer is gone, before the others can agree on what to do"
_FOR_NCCL = {
    # Where a peer is dead its agent says so and the communicators are aborted.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", _ENDS),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", _ENDS),
    "NCCL_RUNTIME_CONNECT": ("0", "rings would be connected at their first use, which is in a pause"),
}
"""Name -> what ranks need, and what would happen otherwise."""


class GpuRefused(RuntimeError):
    """A setting with which a job must not run on a GPU. The text names it and what to change."""


def rank_environment(slot: int, visible: Sequence[str]) -> dict[str, str]:
    """What a rank of `slot` must find in its environment when it starts. `visible`: the node's GPUs, in slot order.

    More slots than GPUs share them, in turn. Nothing on a node without GPUs.
    """
    if not visible:
        return {}
    at = slot % len(visible)
    for_nccl = {name: needed for name, (needed, _) in _FOR_NCCL.items()}
    return {VISIBLE: ",".join((*visible[at:], *visible[:at])), **for_nccl}


def listed_gpus(text: str) -> tuple[str, ...]:
    """The GPUs in the output of `nvidia-smi -L`, by the names that CUDA takes."""
    return tuple(re.findall(r"^GPU \d+: .*\(UUID: (GPU-[0-9a-fA-F-]+)\)", text, re.MULTILINE))


def visible_gpus(environment: Mapping[str, str], present: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that a node offers: those that its environment names, otherwise all `present`."""
    named = environment.get(VISIBLE)
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
    """Raise GpuRefused for a setting that would end a job with handoffs on a GPU, or read it wrongly."""
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise GpuRefused(
            "CUDA_LAUNCH_BLOCKING: is set; with two worlds in a process two threads would wait for each other's "
            "collectives for ever. Unset it"
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        settings = environment.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in settings:
            raise GpuRefused(
                f"{name}: expandable_segments is True; such memory cannot be opened by another process, so state could "
                "not be read. Leave it out, or set expandable_segments:False"
            )


def check_job_environment(environment: Mapping[str, str]) -> None:
    """Raise GpuRefused for a variable of a job file that takes away what its ranks need on a node with GPUs."""
    if VISIBLE in environment:
        raise GpuRefused(
            f"environment.{VISIBLE}: is set in the job file; the agent sets it for each rank. Leave it out, and start "
            "the agent with those GPUs that its node offers"
        )
    for name, (needed, otherwise) in _FOR_NCCL.items():
        if environment.get(name, needed) != needed:
            raise GpuRefused(f"environment.{name}: is {environment[name]}; {otherwise}. Leave it out")
