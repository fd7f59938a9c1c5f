"""Released storage: build modules, buffers and optimizers that have structure but no memory.

While `released()` is active on a thread, tensors made there keep their shape, dtype and views, but their storage is
given back at once and every write into such a storage is skipped. `restore` gives the memory back when it is wanted.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KEEP_BYTES = 4096
# Storage address -> bytes it had when it was released. An address that is used again is overwritten at its release.
_SIZES: dict[int, int] = {}
_PINNED: set[int] = set()
"""Addresses of storages in host memory that are pinned."""
_ALIASING = ("view", "_unsafe_view", "alias", "detach", "slice", "select", "expand", "t", "transpose", "as_strided")


def storage_is_released(tensor: torch.Tensor) -> bool:
    """True when the tensor has elements but its storage holds none."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def release(tensors: Iterable[torch.Tensor]) -> int:
    """Give the storages behind `tensors` back to the allocator; views of them keep their geometry. Returns bytes."""
    storages = [storage for storage in _storages(tensors) if storage.nbytes()]
    freed = sum(storage.nbytes() for storage in storages)
    for storage in storages:
        _SIZES[storage._cdata] = storage.nbytes()
        storage.resize_(0)
    return freed


def restore(tensors: Iterable[torch.Tensor]) -> int:
    """Allocate again the storages behind released `tensors`; content is undefined. Returns bytes allocated."""
    storages = _storages(tensor for tensor in tensors if storage_is_released(tensor))
    for storage in storages:
        storage.resize_(_SIZES.pop(storage._cdata))
    return sum(storage.nbytes() for storage in storages)


def discard(tensors: Iterable[torch.Tensor]) -> int:
    """Give the memory behind `tensors` back for good, whoever still refers to them. Returns bytes.

    A storage that numpy has seen cannot be resized; its pages are handed to the system instead, its addresses stay.
    """
    storages = [storage for storage in _storages(tensors) if storage.nbytes()]
    freed = sum(storage.nbytes() for storage in storages)
    for storage in storages:
        if storage.data_ptr() in _PINNED:
            _PINNED.discard(storage.data_ptr())
            _cudart().cudaHostUnregister(storage.data_ptr())
        try:
            storage.resize_(0)
        except RuntimeError:
            if storage.device.type != "cpu":
                raise
            start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                _c_library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
    trim()
    return freed


def pin(tensor: torch.Tensor) -> None:
    """Pin the host memory of `tensor`, until `discard`, so that the device copies from and to it by itself.

    In place: torch's own pinned memory is rounded up to a power of two, which no budget would know of. Raises
    MemoryError where the system does not allow it, for instance by a limit of locked memory.
    """
    storage = tensor.untyped_storage()
    status = int(_cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if status:
        raise MemoryError(f"{storage.nbytes()} bytes of host memory cannot be pinned: CUDA error {status}")
    _PINNED.add(storage.data_ptr())


def _cudart() -> Any:
    """The CUDA runtime that torch is linked with; its annotation says None."""
    return torch.cuda.cudart()


def trim() -> None:
    """Make the C library return what was freed to the system: without it a build's passing tensors stay resident."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def collect() -> None:
    """Collect what refers to itself in circles, and return it to the system. Stops all threads for some hundredths of a
    second. What was imported before the first world is frozen, so this looks at the worlds only.
    """
    gc.collect()
    trim()


_c_library = ctypes.CDLL(None)
# Only glibc has it; elsewhere freed memory goes back by the allocator's own rules.
_malloc_trim = getattr(_c_library, "malloc_trim", None)


@contextmanager
def released() -> Iterator[_ReleaseMode]:
    """Within this block, on this thread, new tensors above 4 KiB have no memory and writes to them are skipped.

    Peak memory of a build is the single largest tensor in the making (a buffer that is allocated and given back), not
    the sum. Small tensors stay real: step counters and scales must be computed with.
    """
    mode = _ReleaseMode()
    with mode:
        yield mode


class _ReleaseMode(TorchDispatchMode):
    """Skips operations on released tensors and releases what factories return. `peak_bytes` is the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled within the block; torch's guard against it would be a tenth of each operation's cost.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        touched = _tensors_in(args, kwargs)
        hollow = any(storage_is_released(tensor) for tensor in touched)
        if not hollow:
            return self._after(func(*args, **kwargs))
        if _is_view(func):
            return self._viewed(func, args, kwargs, touched)
        if touched and _is_in_place(func):
            return touched[0]
        return self._after(_hollow_result(func, args, kwargs))

    def _viewed(self, func, args, kwargs, touched: list[torch.Tensor]):
        """Torch checks a view against the storage's size, so the storage has it back, untouched, for that moment."""
        storages = _storages(tensor for tensor in touched if storage_is_released(tensor))
        for storage in storages:
            storage.resize_(_SIZES[storage._cdata])
        try:
            return func(*args, **kwargs)
        finally:
            for storage in storages:
                storage.resize_(0)

    def _after(self, result):
        for tensor in _tensors_in((result,), {}):
            storage = tensor.untyped_storage()
            if storage.nbytes() > _KEEP_BYTES:
                self.peak_bytes = max(self.peak_bytes, storage.nbytes())
                _SIZES[storage._cdata] = storage.nbytes()
                storage.resize_(0)
        return result


def _tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, also those in lists: operators nest no deeper."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


@functools.cache
def _is_in_place(func) -> bool:
    return func._schema.name.endswith("_")


@functools.cache
def _is_view(func) -> bool:
    return func._schema.name.removeprefix("aten::") in _ALIASING or func.is_view


def _hollow_result(func, args, kwargs):
    """The result of a functional operation on released inputs: right shape and dtype, no content."""
    source = _tensors_in(args, kwargs)[0]
    name = func._schema.name.removeprefix("aten::")
    if name not in ("clone", "_to_copy", "zeros_like", "empty_like", "ones_like"):
        raise RuntimeError(
            f"aten::{name} on a tensor without memory while a world is built: the value would be undefined"
        )
    return torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=source.device)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())
