"""A group over gloo whose ranks share a GPU, so that NCCL cannot serve them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]
_ProcessGroup: Any = dist.ProcessGroup  # The names of its parameters differ between versions of torch.


class SharedGpuGroup(_ProcessGroup):
    """Gathers several tensors one after the other.

    Gloo's own way to gather several at once reads a GPU's memory as the host's, and the process dies of SIGSEGV
    (pytorch issue 152645; torch 2.11 on an H100). Megatron gathers weights that way after each step. Gloo copies
    through host memory in all other collectives; sends and receives fail (`writev: Bad address`), and layouts with
    pipeline stages are refused.
    """

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Whole tensors. torch 2.13 has this name, older ones the other."""
        works = [
            dist.all_gather_into_tensor(output, source, group=self, async_op=True)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return _All(works)

    allgather_into_tensor_coalesced = all_gather_single_coalesced


class _All(dist.Work):
    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        limit = () if timeout is None else (timeout,)
        for work in self._works:
            work.wait(*limit)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
