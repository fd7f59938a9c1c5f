"""The group whose other members are not there. One rank builds in it: Megatron compares parameter groups meanwhile."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from liver_core.worlds.alone_group import AloneGroup, copied

_ProcessGroup: Any = dist.ProcessGroup  # The names of its parameters differ between versions of torch.


class AbsentGroup(AloneGroup):
    """The others are taken to say what this rank says. So what is reduced or scattered means nothing."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        _ProcessGroup.__init__(self, rank, size)
        self._name = name

    def getBackendName(self) -> str:
        """How torch calls it."""
        return "absent"

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """One list for each input, with an output for each member."""
        pairs = [(output, source) for each, source in zip(outputs, inputs, strict=True) for output in each]
        return copied([output for output, _ in pairs], [source for _, source in pairs])
