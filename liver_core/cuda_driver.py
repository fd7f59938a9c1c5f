"""CUDA's driver through ctypes, as far as a stream relay and its ranks need it: memory that one process exports and
another opens, and copies from there to the host. No torch; nothing is loaded before `load`.

After cuda.h of CUDA 13: where a call has a second version, that one, which drivers have had since CUDA 4, and
cuIpcOpenMemHandle since CUDA 11. Read only: none of it was run on a GPU.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Protocol

HANDLE_BYTES = 64
PITCH_MAX = (1 << 31) - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of all GPUs so far."""
BUS_ID_BYTES_MAX = 32
_DEVICE, _HOST = 2, 1  # CUmemorytype
_LEGACY_IPC = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_WAIT_ASLEEP = 4  # CU_CTX_SCHED_BLOCKING_SYNC
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE


class CudaRefused(Exception):
    """A call that CUDA's driver refused, by its own name of the error, or there is no driver."""


class CudaDriver(Protocol):
    """What relay and ranks ask of the driver. `device`: CUDA's number of it in this process; addresses are of devices
    unless a name says host. What touches memory or streams needs `enter` in its thread. All raise CudaRefused."""

    def device(self, index: int) -> int:
        """The visible device of this index, as torch counts."""
        ...

    def device_at(self, bus_id: str) -> int: ...
    def bus_id(self, device: int) -> str: ...

    def wait_asleep(self, device: int) -> None:
        """Have threads sleep, not spin, in `wait_for`. Before the first `enter` of this process."""
        ...

    def enter(self, device: int) -> None:
        """What this thread asks from now on is about this device, in its primary context."""
        ...

    def range_of(self, address: int) -> tuple[int, int]:
        """First address and bytes of the allocation that it lies in."""
        ...

    def is_exportable(self, address: int) -> bool: ...
    def export(self, base: int) -> bytes:
        """The handle, HANDLE_BYTES long, by which another process opens this allocation."""
        ...

    def open(self, handle: bytes) -> int:
        """Where the allocation of another process begins in this one. Counted: each needs its `close`."""
        ...

    def close(self, base: int) -> None: ...
    def make_stream(self) -> int: ...
    def end_stream(self, stream: int) -> None: ...
    def copy(self, host: int, address: int, size: int, stream: int) -> None:
        """Queue a copy to pinned memory of the host."""
        ...

    def copy_rows(self, host: int, address: int, length: int, count: int, stride: int, stream: int) -> None:
        """Queue a copy of `count` rows of `length` bytes, each `stride` bytes after the one before, PITCH_MAX at most.
        On the host they lie one behind the other."""
        ...

    def wait_for(self, stream: int) -> None:
        """Return when all that was queued has been done."""
        ...

    def host_alloc(self, size: int) -> int:
        """Pinned memory of the host, for all devices."""
        ...

    def host_free(self, host: int) -> None: ...


class _IpcHandle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_uint),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


_INT, _UINT, _SIZE = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_ADDRESS, _POINTER, _TEXT = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetAttribute": (_POINTER, _INT, _INT),
    "cuDeviceGetByPCIBusId": (_POINTER, _TEXT),
    "cuDeviceGetPCIBusId": (_TEXT, _INT, _INT),
    "cuDevicePrimaryCtxSetFlags_v2": (_INT, _UINT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuCtxSetCurrent": (_POINTER,),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _ADDRESS),
    "cuPointerGetAttribute": (_POINTER, _INT, _ADDRESS),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_POINTER, _IpcHandle, _UINT),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuStreamCreate": (_POINTER, _UINT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamSynchronize": (_POINTER,),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpy2DAsync_v2": (_POINTER, _POINTER),
    "cuMemHostAlloc": (_POINTER, _SIZE, _UINT),
    "cuMemFreeHost": (_POINTER,),
    "cuFlushGPUDirectRDMAWrites": (_INT, _INT),
}
"""Name in libcuda.so.1 to the types of its arguments. Every one returns a CUresult."""


class LoadedDriver:
    """`CudaDriver` over the library of this machine. For any thread."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._functions: dict[str, Any] = {}
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()

    def call(self, name: str, *arguments: Any) -> None:
        """Any of `_CALLS`. Raises CudaRefused."""
        if (function := self._functions.get(name)) is None:
            function = getattr(self._library, name, None)
            if function is None:
                raise CudaRefused(f"CUDA's driver has no {name}: it is too old for this; install a newer one")
            function.argtypes, function.restype = _CALLS[name], ctypes.c_int
            self._functions[name] = function
        if status := function(*arguments):
            raise CudaRefused(f"{name.removesuffix('_v2')}: {self._error_name(status)}")

    def device(self, index: int) -> int:
        found = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(found), index)
        return found.value

    def attribute(self, device: int, number: int) -> int:
        """Of a device, by its CUdevice_attribute."""
        found = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(found), number, device)
        return found.value

    def device_at(self, bus_id: str) -> int:
        found = ctypes.c_int()
        self.call("cuDeviceGetByPCIBusId", ctypes.byref(found), bus_id.encode())
        return found.value

    def bus_id(self, device: int) -> str:
        text = ctypes.create_string_buffer(BUS_ID_BYTES_MAX)
        self.call("cuDeviceGetPCIBusId", text, BUS_ID_BYTES_MAX, device)
        return text.value.decode()

    def wait_asleep(self, device: int) -> None:
        self.call("cuDevicePrimaryCtxSetFlags_v2", device, _WAIT_ASLEEP)

    def enter(self, device: int) -> None:
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = self._pointer("cuDevicePrimaryCtxRetain", device)
        self.call("cuCtxSetCurrent", self._contexts[device])

    def range_of(self, address: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def is_exportable(self, address: int) -> bool:
        found = ctypes.c_int()
        self.call("cuPointerGetAttribute", ctypes.byref(found), _LEGACY_IPC, address)
        return bool(found.value)

    def export(self, base: int) -> bytes:
        handle = _IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        found, given = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(found), given, _LAZY_PEER_ACCESS)
        return found.value

    def close(self, base: int) -> None:
        self.call("cuIpcCloseMemHandle", base)

    def make_stream(self) -> int:
        return self._pointer("cuStreamCreate", _NON_BLOCKING)

    def end_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", stream)

    def copy(self, host: int, address: int, size: int, stream: int) -> None:
        self.call("cuMemcpyDtoHAsync_v2", host, address, size, stream)

    def copy_rows(self, host: int, address: int, length: int, count: int, stride: int, stream: int) -> None:
        rows = _Copy2D(
            source_type=_DEVICE,
            source_device=address,
            source_pitch=stride,
            target_type=_HOST,
            target_host=host,
            target_pitch=length,
            width=length,
            height=count,
        )
        self.call("cuMemcpy2DAsync_v2", ctypes.byref(rows), stream)

    def wait_for(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def host_alloc(self, size: int) -> int:
        return self._pointer("cuMemHostAlloc", size, _PORTABLE)

    def host_free(self, host: int) -> None:
        self.call("cuMemFreeHost", host)

    def _pointer(self, name: str, *arguments: Any) -> int:
        """What a call leaves where its first argument points."""
        found = ctypes.c_void_p()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value or 0

    def _error_name(self, status: int) -> str:
        found = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(found))
        return found.value.decode() if found.value else f"CUDA error {status}"


_loaded: LoadedDriver | None = None
_loading = threading.Lock()


def load() -> LoadedDriver:
    """The driver of this process, which the first call loads and starts. Raises CudaRefused."""
    global _loaded
    with _loading:
        if _loaded is None:
            try:
                made = LoadedDriver(ctypes.CDLL("libcuda.so.1"))
            except OSError as error:
                text = f"CUDA's driver cannot be loaded: {error}; where this runs in a container, give it the GPUs"
                raise CudaRefused(text) from None
            made.call("cuInit", 0)
            _loaded = made
        return _loaded
