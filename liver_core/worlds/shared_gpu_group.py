"""A group over gloo whose ranks share a GPU, so that NCCL cannot serve them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]
_HOST = torch.device("cpu")
_ProcessGroup: Any = dist.ProcessGroup  # The names of its parameters differ between versions of torch.


class SharedGpuGroup(_ProcessGroup):
    """Does by itself what gloo does wrongly with a GPU's memory, seen with torch 2.11 on an H100.

    Gloo copies through host memory in most collectives. Where several tensors are gathered at once it reads a GPU's
    memory as the host's, and the process dies of SIGSEGV (pytorch issue 152645); Megatron gathers weights that way
    after each step. Sends do the same: `writev: Bad address`, or SIGABRT.
    """

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """One after the other. torch 2.13 has this name, older ones the other."""
        works = [
            dist.all_gather_into_tensor(output, source, group=self, async_op=True)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return _All(works)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def send(self, tensors: Tensors, destination: int, tag: int) -> dist.Work:
        """From a copy in host memory. Waits for what this thread has queued."""
        copies = [tensor.detach().to(_HOST, copy=True) for tensor in tensors]
        return _Landing(self._get_backend(_HOST).send(copies, destination, tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        """Into host memory. What `wait` has returned from is queued to be copied on from there."""
        copies = [torch.empty_like(tensor, device=_HOST) for tensor in tensors]
        return _Landing(self._get_backend(_HOST).recv(copies, source, tag), copies, tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """As `recv`."""
        copies = [torch.empty_like(tensor, device=_HOST) for tensor in tensors]
        return _Landing(self._get_backend(_HOST).recv_anysource(copies, tag), copies, tensors)


class _All(dist.Work):
    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            _wait(work, timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _Landing(dist.Work):
    """`copies` go to `tensors` when somebody waits."""

    def __init__(self, work: Any, copies: Tensors = (), tensors: Tensors = ()) -> None:
        super().__init__()
        self._work = work
        self._left = list(zip(tensors, copies, strict=True))

    def wait(self, timeout: Any = None) -> bool:
        _wait(self._work, timeout)
        left, self._left = self._left, []
        with torch.no_grad():
            for tensor, copy in left:
                tensor.copy_(copy)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and not self._left

    def _source_rank(self) -> int:
        return self._work._source_rank()


def _wait(work: Any, timeout: Any) -> None:
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
