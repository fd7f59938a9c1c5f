"""Released storage: build modules, buffers and optimizers that have structure but no memory.

While `released()` is active on a thread, tensors made there have shape, dtype and views, but their storage holds no
bytes. Writes into such storage are skipped. `restore` allocates the memory when it is needed.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KEEP_BYTES = 4096
# Storage address -> its bytes when it was released. If an address is reused, its next release overwrites the entry.
_SIZES: dict[int, int] = {}
_PINNED: set[int] = set()
"""Addresses of pinned storages in host memory."""
_COPIES = ("clone", "_to_copy")
_FACTORIES = frozenset(
    f"{new}{name}{like}"
    for name in ("empty", "empty_strided", "zeros", "ones", "full")
    for new, like in (("", ""), ("new_", ""), ("", "_like"))
)
_UNCHECKED = ("view", "_unsafe_view", "alias", "detach")
"""Views that torch makes without a look at the size of the storage."""
_ALIASING = (*_UNCHECKED, "slice", "select", "expand", "t", "transpose", "as_strided")


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

    In host memory exactly their pages go back to the system. The C library would keep them, and told to give back what
    it keeps (malloc_trim) it also gives back what each training step uses again: after one trim a step of 95 ms took
    35 ms more to get that memory anew. Torch cannot resize a storage that numpy has seen; such a storage keeps its
    addresses.
    """
    storages = [storage for storage in _storages(tensors) if storage.nbytes()]
    freed = sum(storage.nbytes() for storage in storages)
    for storage in storages:
        if storage.data_ptr() in _PINNED:
            _PINNED.discard(storage.data_ptr())
            _cudart().cudaHostUnregister(storage.data_ptr())
        if storage.device.type == "cpu":
            _give_back_pages(storage)
        try:
            storage.resize_(0)
        except RuntimeError:
            if storage.device.type != "cpu":
                raise
    return freed


def _give_back_pages(storage: torch.UntypedStorage) -> None:
    """Those that lie whole within the storage. What they hold is undefined from then on."""
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        _c_library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def pin(tensors: Iterable[torch.Tensor]) -> None:
    """Pin the host memory behind `tensors` in place, until `discard`. The device can then copy from and to it directly.

    Torch's own pinned memory is not used: it is rounded up to a power of two, which the budget would not count. Raises
    MemoryError if the system refuses, for example because of a limit on locked memory.
    """
    for storage in _storages(tensors):
        status = int(_cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
        if status:
            raise MemoryError(f"{storage.nbytes()} bytes of host memory cannot be pinned: CUDA error {status}")
        _PINNED.add(storage.data_ptr())


def _cudart() -> Any:
    """The CUDA runtime that torch is linked with. Its annotation wrongly says None."""
    return torch.cuda.cudart()


def collect() -> None:
    """Collect objects in reference cycles.

    Stops all threads for some hundredths of a second. Objects imported before the first world are frozen, so the
    collector looks at the worlds only.
    """
    gc.collect()


_c_library = ctypes.CDLL(None)


@contextmanager
def released() -> Iterator[_ReleaseMode]:
    """Within this block, on this thread, new tensors above 4 KiB have no memory and writes to them are skipped. Tensors
    from before the block keep theirs.

    So a build takes no memory: its tensors never had any, except for results of operations on tensors that have memory.
    Small tensors keep theirs: the build computes with step counters and scales.
    """
    mode = _ReleaseMode()
    with mode:
        yield mode


class _ReleaseMode(TorchDispatchMode):
    """Makes tensors without memory and skips operations on them. `peak_bytes` is the largest tensor so far that had
    memory for a moment."""

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
        if any(storage_is_released(tensor) for tensor in touched):
            if _is_unchecked(func):
                return _still_hollow(func(*args, **kwargs))
            if _is_view(func):
                return _hollow_views(func, args, kwargs)
            if _is_in_place(func):
                return touched[0]
            return _hollow_result(func, args, kwargs)
        if _is_factory(func) and not kwargs.get("pin_memory"):
            meta = _on_meta(func, args, kwargs | {"device": torch.device("meta")})
            if meta.untyped_storage().nbytes() > _KEEP_BYTES:
                device = kwargs.get("device") or (touched[0].device if touched else "cpu")
                return _hollow(meta.shape, meta.stride(), meta.dtype, device)
        # A result may be a view of an argument, or the argument itself: the world that trains owns that memory.
        aliased = [] if _is_fresh(func) else touched
        before = {storage._cdata for storage in _storages(aliased) if storage.nbytes()}
        return self._after(func(*args, **kwargs), before)

    def _after(self, result, before: set[int]):
        """Release the new tensors in `result`: those whose storage is not one of `before`."""
        for tensor in _tensors_in((result,), {}):
            storage = tensor.untyped_storage()
            if storage.nbytes() > _KEEP_BYTES and storage._cdata not in before:
                self.peak_bytes = max(self.peak_bytes, storage.nbytes())
                _SIZES[storage._cdata] = storage.nbytes()
                storage.resize_(0)
        return result


def _hollow(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A new tensor, without memory if it is not small."""
    empty = torch.empty(0, dtype=dtype, device=device)
    elements = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if elements * empty.element_size() <= _KEEP_BYTES:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
    _SIZES[empty.untyped_storage()._cdata] = elements * empty.element_size()
    return _placed(empty, shape, stride, 0, dtype)


def _still_hollow(view: torch.Tensor) -> torch.Tensor:
    """A view that torch made. Its fake tensors give the storage its bytes back, others do not."""
    storage = view.untyped_storage()
    if storage.nbytes():
        storage.resize_(0)
    return view


def _hollow_views(func, args, kwargs):
    """The views that a view operation makes of a tensor without memory, worked out from geometry alone."""

    def view(meta: torch.Tensor) -> torch.Tensor:
        return _placed(base, meta.shape, meta.stride(), int(meta.storage_offset()), meta.dtype)

    base = next(tensor for tensor in _tensors_in(args, kwargs) if storage_is_released(tensor))
    return _each_tensor(view, _on_meta(func, args, kwargs))


def _on_meta(func, args, kwargs) -> Any:
    """What the operation makes of tensors that have geometry only."""
    twins = {name: _each_tensor(_twin, value) for name, value in kwargs.items()}
    return func(*(_each_tensor(_twin, value) for value in args), **twins)


def _each_tensor(action: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `action` done to it, or to its tensors if it is a list. Torch's trees do the same for any nesting,
    and take longer than the operation."""
    if isinstance(value, torch.Tensor):
        return action(value)
    if type(value) in (list, tuple):
        return type(value)(_each_tensor(action, each) for each in value)
    return value


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    size = _SIZES.get(tensor.untyped_storage()._cdata, 0) if storage_is_released(tensor) else 0
    offset = int(tensor.storage_offset())
    elements = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1 + offset
    elements = max(elements, size // tensor.element_size())
    whole = torch.empty(elements, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), offset)


def _placed(
    base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of this geometry over the storage of `base`, which holds no bytes.

    Torch refuses a tensor that is larger than its storage, except by the function that its CUDA graphs use. Without a
    GPU the storage is large for a moment: nothing is written to it, so the system gives it no memory.
    """
    storage = base.untyped_storage()
    construct = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
    if base.is_cuda and construct is not None:
        whole = {"size": tuple(shape), "stride": tuple(stride), "storage_offset": offset, "dtype": dtype}
        return construct(whole, storage)
    made = torch.empty(0, dtype=dtype, device=base.device)
    made.set_(storage, offset, tuple(shape), tuple(stride))
    storage.resize_(0)
    return made


def _tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, including those in lists. Operators do not nest deeper."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def _name(func) -> str:
    return func._schema.name.removeprefix("aten::")


@functools.cache
def _is_in_place(func) -> bool:
    return func._schema.name.endswith("_")


@functools.cache
def _is_factory(func) -> bool:
    """Whether it makes a tensor of which only the geometry depends on its arguments. A random one draws numbers."""
    return _name(func) in _FACTORIES


@functools.cache
def _is_fresh(func) -> bool:
    """Whether it returns its argument because that was made just now: the last part of `torch.tensor`."""
    return _name(func) == "lift_fresh"


@functools.cache
def _is_unchecked(func) -> bool:
    return _name(func) in _UNCHECKED


@functools.cache
def _is_view(func) -> bool:
    return _name(func) in _ALIASING or func.is_view


def _hollow_result(func, args, kwargs):
    """The result of a functional operation on released inputs: it has the right shape and dtype, and no content."""
    source = _tensors_in(args, kwargs)[0]
    name = _name(func)
    if name not in _COPIES and not _is_factory(func):
        raise RuntimeError(
            f"aten::{name} on a tensor without memory: a next world is built without it, so build must not compute "
            "with parameters nor initialise them (perform_initialization=False)"
        )
    meta = _on_meta(func, args, kwargs | {"device": torch.device("meta")} if name != "clone" else kwargs)
    return _hollow(meta.shape, meta.stride(), meta.dtype, kwargs.get("device") or source.device)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())
