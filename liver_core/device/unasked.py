"""Whether there is a GPU, found out without starting anything: for a process that others are forked from.

`torch.cuda.is_available` asks NVML at best, and with some drivers NVML starts CUDA (580.159 on an H100: a thread, and
/dev/nvidia-uvm open). Torch and Megatron call it while they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from liver_core.gpu_environment import VISIBLE, visible_gpus

CONTROL = "nvidiactl"
"""The driver makes this file of /dev when it is loaded."""


def gpu_is_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> bool:
    """Whether torch is built for CUDA, the driver is loaded, and the environment hides not all GPUs."""
    hidden = VISIBLE in environment and not visible_gpus(environment, ())
    return torch.version.cuda is not None and (devices / CONTROL).exists() and not hidden


@contextmanager
def cuda_unasked() -> Iterator[bool]:
    """Within this block whoever asks torch for a GPU is told what `gpu_is_here` finds. Yields that."""
    here, asked = gpu_is_here(), torch.cuda.is_available
    torch.cuda.is_available = lambda: here
    try:
        yield here
    finally:
        torch.cuda.is_available = asked
