"""Released storage: build modules, buffers and optimizers that have structure but no memory.

While `released()` is active on a thread, tensors made there keep shape, dtype and views, but their storage is freed at
once. Writes into freed storage are skipped. `restore` allocates the memory when it is needed.
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
# Storage address -> its bytes when it was released. If an address is reused, its next release overwrites the entry.
_SIZES: dict[int, int] = {}
_PINNED: set[int] = set()
"""Addresses of pinned storages in host memory."""
_ALIASING = ("view", "_unsafe_view", "alias", "detach", "slice", "select", "expand", "t", "transpose", "as_strided")


def storage_is_released(tensor: torch.Tensor) -> bool:
    """True when the tensor has elements but its storage holds none."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def release(tensors: Iterable[torch.Tensor]) -> int:
    """Free the storages behind `tensors`. Views of them keep their geometry. Returns bytes freed."""
    storages = [storage for storage in _storages(tensors) if storage.nbytes()]
    freed = sum(storage.nbytes() for storage in storages)
    for storage in storages:
        _SIZES[storage._cdata] = storage.nbytes()
        storage.resize_(0)
    return freed


def restore(tensors: Iterable[torch.Tensor]) -> int:
    """Allocate the storages behind released `tensors` again. Their content is undefined. Returns bytes allocated."""
    storages = _storages(tensor for tensor in tensors if storage_is_released(tensor))
    for storage in storages:
        storage.resize_(_SIZES.pop(storage._cdata))
    return sum(storage.nbytes() for storage in storages)


def discard(tensors: Iterable[torch.Tensor]) -> int:
    """Free the memory behind `tensors` for good, even if something still refers to them. Returns bytes freed.

    Torch cannot resize a storage that numpy has seen. Such a storage keeps its addresses; only its pages go back to the
    system.
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
    """Pin the host memory of `tensor` in place, until `discard`. The device can then copy from and to it directly.

    Torch's own pinned memory is not used: it is rounded up to a power of two, which the budget would not count. Raises
    MemoryError if the system refuses, for example because of a limit on locked memory.
    """
    storage = tensor.untyped_storage()
    status = int(_cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if status:
        raise MemoryError(f"{storage.nbytes()} bytes of host memory cannot be pinned: CUDA error {status}")
    _PINNED.add(storage.data_ptr())


def _cudart() -> Any:
    """The CUDA runtime that torch is linked with. Its annotation wrongly says None."""
    return torch.cuda.cudart()


def trim() -> None:
    """Make the C library return freed memory to the system. Without it, temporary tensors of a build stay resident."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def collect() -> None:
    """Collect objects in reference cycles and return their memory to the system.

    Stops all threads for some hundredths of a second. Objects imported before the first world are frozen, so the
    collector looks at the worlds only.
    """
    gc.collect()
    trim()


_c_library = ctypes.CDLL(None)
# Only glibc has it. Elsewhere the allocator decides when freed memory goes back to the system.
_malloc_trim = getattr(_c_library, "malloc_trim", None)


@contextmanager
def released() -> Iterator[_ReleaseMode]:
    """Within this block, on this thread, new tensors above 4 KiB have no memory and writes to them are skipped. Tensors
    from before the block keep theirs.

    So the peak memory of a build is its largest single tensor (allocated, then freed), not the sum of all tensors.
    Small tensors keep their memory: the build computes with step counters and scales.
    """
    mode = _ReleaseMode()
    with mode:
        yield mode


class _ReleaseMode(TorchDispatchMode):
    """Skips operations on released tensors and releases new tensors. `peak_bytes` is the largest tensor so far."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled within the block. Torch's check for it would take a tenth of each operation's time.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        touched = _tensors_in(args, kwargs)
        hollow = any(storage_is_released(tensor) for tensor in touched)
        if not hollow:
            # A result may be a view of an argument, or the argument itself: the world that trains owns that memory.
            aliased = [] if _is_fresh(func) else touched
            before = {storage._cdata for storage in _storages(aliased) if storage.nbytes()}
            return self._after(func(*args, **kwargs), before)
        if _is_view(func):
            return self._viewed(func, args, kwargs, touched)
        if touched and _is_in_place(func):
            return touched[0]
        return self._after(_hollow_result(func, args, kwargs), set())

    def _viewed(self, func, args, kwargs, touched: list[torch.Tensor]):
        """Torch checks a view against its storage's size. Restore the storage for this call; nothing writes to it."""
        storages = _storages(tensor for tensor in touched if storage_is_released(tensor))
        for storage in storages:
            storage.resize_(_SIZES[storage._cdata])
        try:
            return func(*args, **kwargs)
        finally:
            for storage in storages:
                storage.resize_(0)

    def _after(self, result, before: set[int]):
        """Release the new tensors in `result`: those whose storage is not one of `before`."""
        for tensor in _tensors_in((result,), {}):
            storage = tensor.untyped_storage()
            if storage.nbytes() > _KEEP_BYTES and storage._cdata not in before:
                self.peak_bytes = max(self.peak_bytes, storage.nbytes())
                _SIZES[storage._cdata] = storage.nbytes()
                storage.resize_(0)
        return result


def _tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, including those in lists. Operators do not nest deeper."""
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
def _is_fresh(func) -> bool:
    """Whether it returns its argument because that was made just now: the last part of `torch.tensor`."""
    return func._schema.name.removeprefix("aten::") == "lift_fresh"


@functools.cache
def _is_view(func) -> bool:
    return func._schema.name.removeprefix("aten::") in _ALIASING or func.is_view


def _hollow_result(func, args, kwargs):
    """The result of a functional operation on released inputs: it has the right shape and dtype, and no content."""
    source = _tensors_in(args, kwargs)[0]
    name = func._schema.name.removeprefix("aten::")
    if name not in ("clone", "_to_copy", "zeros_like", "empty_like", "ones_like"):
        raise RuntimeError(
            f"aten::{name} on a tensor without memory: a next world is built without it, so build must not compute "
            "with parameters nor initialise them (perform_initialization=False)"
        )
    return torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=source.device)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())
