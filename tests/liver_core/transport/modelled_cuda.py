"""A model of CUDA's driver where there is no GPU: `CudaDriver` over memory of the host.

An allocation is a mapping of its process, and a handle is pid and address of its base. What is opened lies at addresses
of its own, and copies happen when their stream is waited for. Calls are refused that the driver refuses or is slow at:
without a context in their thread, to memory that is not pinned, of bytes that no open allocation has. Run as a program
it is a relay over this model.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from liver_core.cuda_driver import HANDLE_BYTES, PITCH_MAX, CudaRefused
from liver_core.transport.relay import __main__
from liver_core.transport.relay.memory import Block, ProcessMemory
from tests.liver_core.transport.relays import MYSELF

BUS_ID = "0000:3B:00.0"
_HANDLE = struct.Struct("<QQ")
_FAR = 0x7000_0000_0000


class ModelledCuda:
    """One GPU. `opened`: base here to exporter, address there, bytes and how often. `refuse`: call to the error that it
    is answered with. `apart`: bytes from where one allocation is opened to the next."""

    apart = 1 << 40

    def __init__(self) -> None:
        self.refuse: dict[str, str] = {}
        self.opened: dict[int, tuple[int, int, int, int]] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.pinned: dict[int, ctypes.Array[ctypes.c_uint8]] = {}
        self.copies: list[str] = []
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._made = 0

    def device(self, index: int) -> int:
        return index

    def device_at(self, bus_id: str) -> int:
        if bus_id != BUS_ID:
            raise CudaRefused("cuDeviceGetByPCIBusId: CUDA_ERROR_INVALID_DEVICE")
        return 0

    def bus_id(self, device: int) -> str:
        return BUS_ID

    def wait_asleep(self, device: int) -> None:
        self._answer("cuDevicePrimaryCtxSetFlags")

    def enter(self, device: int) -> None:
        self._answer("cuDevicePrimaryCtxRetain")
        self._thread.device = device

    def range_of(self, address: int) -> tuple[int, int]:
        self._in_context("cuMemGetAddressRange")
        with self._lock:
            for base, (_, _, size, _) in self.opened.items():
                if base <= address < base + size:
                    return base, size
        return mapping_of(os.getpid(), address)

    def is_exportable(self, address: int) -> bool:
        self._in_context("cuPointerGetAttribute")
        return "is_exportable" not in self.refuse

    def export(self, base: int) -> bytes:
        self._in_context("cuIpcGetMemHandle")
        return _HANDLE.pack(os.getpid(), base).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        self._in_context("cuIpcOpenMemHandle")
        pid, address = _HANDLE.unpack(handle[: _HANDLE.size])
        first, size = mapping_of(pid, address)
        size -= address - first
        with self._lock:
            for base, known in self.opened.items():
                if known[:3] == (pid, address, size):
                    self.opened[base] = (*known[:3], known[3] + 1)
                    return base
            self._made += 1
            base = _FAR + self._made * self.apart
            self.opened[base] = pid, address, size, 1
        return base

    def close(self, base: int) -> None:
        self._in_context("cuIpcCloseMemHandle")
        with self._lock:
            pid, address, size, count = self.opened.pop(base)
            if count > 1:
                self.opened[base] = pid, address, size, count - 1

    def make_stream(self) -> int:
        self._in_context("cuStreamCreate")
        with self._lock:
            self._made += 1
            self.streams[self._made] = []
            return self._made

    def end_stream(self, stream: int) -> None:
        self._in_context("cuStreamDestroy")
        assert not self.streams.pop(stream), "copies were still to be done"

    def copy(self, host: int, address: int, size: int, stream: int) -> None:
        self._in_context("cuMemcpyDtoHAsync")
        self._queue(host, np.array([[address, size]], dtype=np.uint64), stream, "run")

    def copy_rows(self, host: int, address: int, length: int, count: int, stride: int, stream: int) -> None:
        self._in_context("cuMemcpy2DAsync")
        if not length <= stride <= PITCH_MAX:
            raise CudaRefused("cuMemcpy2DAsync: CUDA_ERROR_INVALID_VALUE")
        starts = address + stride * np.arange(count, dtype=np.uint64)
        rows = np.stack([starts, np.full(count, length, dtype=np.uint64)], axis=1)
        self._queue(host, rows, stream, f"{count} rows")

    def wait_for(self, stream: int) -> None:
        self._in_context("cuStreamSynchronize")
        while self.streams[stream]:
            self.streams[stream].pop(0)()

    def host_alloc(self, size: int) -> int:
        self._in_context("cuMemHostAlloc")
        made = (ctypes.c_uint8 * size)(*b"\x5a" * 64)
        with self._lock:
            self.pinned[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def host_free(self, host: int) -> None:
        self._in_context("cuMemFreeHost")
        with self._lock:
            del self.pinned[host]

    def _queue(self, host: int, rows: np.ndarray, stream: int, what: str) -> None:
        first, last, size = int(rows[0, 0]), int(rows[-1].sum()), int(rows[:, 1].sum())
        with self._lock:
            around = [base for base, known in self.opened.items() if base <= first and last <= base + known[2]]
            is_pinned = any(base <= host and host + size <= base + len(each) for base, each in self.pinned.items())
            if not around or not is_pinned:
                raise CudaRefused("cuMemcpyDtoHAsync: CUDA_ERROR_INVALID_VALUE")
            pid, address, _, _ = self.opened[around[0]]
        self.copies.append(what)
        there = rows.copy()
        there[:, 0] = rows[:, 0] - np.uint64(around[0]) + np.uint64(address)

        def happen() -> None:
            block = Block()
            ProcessMemory(pid, MYSELF).read(there, block)
            ctypes.memmove(host, block.bytes.ctypes.data, size)

        self.streams[stream].append(happen)

    def _in_context(self, call: str) -> None:
        if not hasattr(self._thread, "device"):
            raise CudaRefused(f"{call}: CUDA_ERROR_INVALID_CONTEXT")
        self._answer(call)

    def _answer(self, call: str) -> None:
        if call in self.refuse:
            raise CudaRefused(f"{call}: {self.refuse[call]}")


def mapping_of(pid: int, address: int) -> tuple[int, int]:
    """First address and bytes of what a process may write to around this address without a gap."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw" in line:
                # The kernel cuts a mapping in two where huge pages end.
                found.append((found.pop()[0] if found and found[-1][1] == low else low, high))
    for low, high in found:
        if low <= address < high:
            return low, high - low
    raise CudaRefused("CUDA_ERROR_INVALID_VALUE")


if __name__ == "__main__":
    sys.exit(__main__.main(ModelledCuda))
