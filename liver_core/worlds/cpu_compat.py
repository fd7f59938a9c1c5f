"""Lets Megatron-Core run where CUDA is absent. Each patch has a name and a reason, and can be switched off alone.

Not for a machine with a GPU: `apply` raises there. An ablation test keeps the list minimal. Settings that are not
patches (use_cpu_initialization, fusions off) belong to the job, see liver_core.training.gpt.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

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


@_patch
def grouped_gemm_of_transformer_engine() -> None:
    """The router of megatron-core 0.16.1 names it without asking whether Transformer Engine is there."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


@_patch
def splits_as_numbers() -> None:
    """The all-to-all of experts takes its splits from the device only, and would pass on tensors of the host."""
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


@_patch
def streams() -> None:
    """The all-to-all of experts copies its splits beside the computation. Here all is done when it is called."""
    torch.cuda.Stream = torch.cuda.Event = _NoStream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: _NoStream()  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]


class _NoStream:
    """A stream, and an event in one."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record_event(self, *_: object) -> _NoStream:
        return self

    def wait_stream(self, *_: object) -> None:
        pass

    wait_event = record = synchronize = wait = wait_stream


@_patch
def uneven_collectives() -> None:
    """With ETP the tokens of all its ranks are gathered, as many as each has. Gloo gathers and reduces equal parts."""
    from megatron.core.tensor_parallel import mappings

    mappings._gather_along_first_dim = _gather_uneven
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_uneven


def _gather_uneven(input_, group, output_split_sizes=None, use_global_buffer=False):
    if group.size() == 1:
        return input_
    rows = [len(input_)] * group.size() if output_split_sizes is None else [int(size) for size in output_split_sizes]
    parts = [input_.new_empty((size, *input_.shape[1:])) for size in rows]
    parts[group.rank()].copy_(input_)
    for source, part in zip(dist.get_process_group_ranks(group), parts, strict=True):
        dist.broadcast(part, src=source, group=group)
    return torch.cat(parts)


def _reduce_scatter_uneven(input_, group, input_split_sizes=None, use_global_buffer=False):
    if group.size() == 1:
        return input_
    whole = input_.contiguous().clone()
    dist.all_reduce(whole, group=group)
    rows = len(whole) // group.size() if input_split_sizes is None else [int(size) for size in input_split_sizes]
    return whole.split(rows)[group.rank()].contiguous()
