"""The group of one rank: it has nobody to talk to, so it needs no connections, threads or memory on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]
_ProcessGroup: Any = dist.ProcessGroup  # The names of its parameters differ between versions of torch.


class _Done(dist.Work):
    """What was asked for has happened: on a GPU, in the queue of the thread that asked."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class AloneGroup(_ProcessGroup):
    """Every collective gives this rank what it has. Sends, receives and scaled sums raise.

    torch 2.13 has renamed some methods of a group; the old names follow the new ones.
    """

    def __init__(self, name: str) -> None:
        super().__init__(0, 1)
        self._name = name

    @property
    def group_name(self) -> str:
        """As torch's registry knows it."""
        return self._name

    def getBackendName(self) -> str:
        """How torch calls it."""
        return "alone"

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """The sum, mean, minimum and maximum of one value are that value."""
        return _reduced(opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """As `allreduce`."""
        return _reduced(opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """As `allreduce`."""
        return _reduced(opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """It has come from here."""
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        """All are here."""
        return _Done()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """One list of one output for each input."""
        return copied([output for (output,) in outputs], inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """As `allgather`."""
        return copied([output for (output,) in outputs], inputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """One list of one input for each output."""
        return copied(outputs, [source for (source,) in inputs])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """As `scatter`."""
        return copied(outputs, [source for (source,) in inputs], opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """One output and one input."""
        return copied(outputs, inputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Whole tensors."""
        return copied([output], [source])

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Whole tensors."""
        return copied([output], [source], opts)

    def all_to_all_single(self, output: torch.Tensor, source: torch.Tensor, *sizes_and_opts: Any) -> dist.Work:
        """Whole tensors; whatever the sizes of its parts, they are all for this rank."""
        return copied([output], [source])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Whole tensors, several at once."""
        return copied(outputs, inputs)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Whole tensors, several at once."""
        return copied(outputs, inputs, opts)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _reduced(opts: Any) -> dist.Work:
    if opts is not None and getattr(opts, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM:
        raise NotImplementedError("a sum that scales its values first is not made in a group of one rank")
    return _Done()


def copied(outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
    """Done: each output has what its input had."""
    done = _reduced(opts)
    with torch.no_grad():
        for output, source in zip(outputs, inputs, strict=True):
            if output.data_ptr() != source.data_ptr():
                output.copy_(source.reshape(output.shape))
    return done
