"""Lets Megatron-Core run where CUDA is absent. Each patch has a name and a reason, and can be switched off alone.

Not for a machine with a GPU: `apply` raises there. An ablation test keeps the list minimal. Settings that are not
patches (use_cpu_initialization, fusions off) belong to the job, see liver_core.training.gpt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch

PATCHES: dict[str, Callable[[], None]] = {}
_applied: set[str] = set()


def apply(without: Iterable[str] = ()) -> tuple[str, ...]:
    """Apply every patch not named in `without`; idempotent. Returns the names applied so far.

    Raises RuntimeError on a machine with CUDA, ValueError for an unknown name.
    """
    if torch.cuda.is_available():
        raise RuntimeError("cpu_compat must not be applied on a machine with a GPU: it would redirect CUDA calls")
    skip = set(without)
    if unknown := skip - PATCHES.keys():
        raise ValueError(f"without: unknown patch {sorted(unknown)}; known are {sorted(PATCHES)}")
    # Importing Megatron binds torch.compile. Each process would then spend 17 s compiling in its first step.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for name, patch in PATCHES.items():
        if name not in skip and name not in _applied:
            patch()
            _applied.add(name)
    return tuple(sorted(_applied))


def _patch(function: Callable[[], None]) -> Callable[[], None]:
    PATCHES[function.__name__] = function
    return function


@_patch
def current_device() -> None:
    """Megatron allocates on `torch.cuda.current_device()`. Without CUDA that is the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]


@_patch
def cuda_factories() -> None:
    """Megatron calls `torch.tensor` and `torch.zeros` with device='cuda' (schedules, optimizer scalars, clip_grads)."""
    for name in ("tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory):
    def made(*args, device=None, **kwargs):
        if isinstance(device, str) and device.startswith("cuda"):
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return made


@_patch
def tensor_type_names() -> None:
    """DistributedOptimizer and clip_grads compare `tensor.type()` with 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type

    def type_name(self, dtype=None, *args, **kwargs):
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]


@_patch
def rng_state() -> None:
    """The CUDA RNG tracker keeps its streams in the CPU generator."""
    from megatron.core.tensor_parallel import random as tracker

    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    tracker._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[assignment]
    tracker._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[assignment]


@_patch
def synchronize() -> None:
    """Pipeline schedules and checkpointing call `torch.cuda.synchronize`. CPU work is synchronous already."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]


@_patch
def tensor_cuda() -> None:
    """Megatron moves optimizer state with `Tensor.cuda` where it saves it without the detour over host memory."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
