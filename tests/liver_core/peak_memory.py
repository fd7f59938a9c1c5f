"""Counts the memory of tensors as operations make and drop them: what is there now, and the most there was."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Bytes of storages that operations within the block have made, on `device` only where one is given.

    A storage counts with the size it has when it is first seen, and when `look` is called. `known` are not counted.
    """

    def __init__(self, device: str | None = None, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._note(value for value in tree_leaves(result) if isinstance(value, torch.Tensor))
        return result

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            at = storage._cdata
            if at in self._known or (self._device is not None and tensor.device.type != self._device):
                continue
            if at not in self._sizes:
                weakref.finalize(storage, self._gone, at)
            self._set(at, storage.nbytes())

    def _set(self, at: int, nbytes: int) -> None:
        self.now += nbytes - self._sizes.get(at, 0)
        self._sizes[at] = nbytes
        self.peak = max(self.peak, self.now)

    def _gone(self, at: int) -> None:
        self.now -= self._sizes.pop(at, 0)
