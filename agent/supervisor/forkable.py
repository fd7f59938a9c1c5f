"""Whether a fork of a process could do what a rank does, or whether it must start as a new program."""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

CUDA_DEVICE = "/dev/nvidia-uvm"
"""The driver opens it where CUDA starts. Asking NVML how many GPUs there are does not."""


def why_not_forked() -> str:
    """Why a fork of this process could not be a rank; empty if it could. Asking starts nothing."""
    return fork_problem(len(os.listdir("/proc/self/task")), sys.modules, _open_files())


def fork_problem(threads: int, modules: Mapping[str, Any], open_files: Iterable[str]) -> str:
    """Pure. `open_files`: what the descriptors of the process point to."""
    cuda = getattr(modules.get("torch"), "cuda", None)
    if (cuda is not None and cuda.is_initialized()) or CUDA_DEVICE in open_files:
        return "a preloaded module has started CUDA in the zygote, and no fork of it could use a GPU"
    if threads != 1:
        return f"the zygote has {threads} threads, a fork would copy only one: a preloaded module started them"
    return ""


def _open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # That of the listing itself.
    return found
