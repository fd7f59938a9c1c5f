"""Reads of the memory of GPUs that ranks of this machine have exported (CUDA IPC), in the relay's own process.

The driver is loaded, and a context made, when a rank first names a GPU. Every error of CUDA is one of the request.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from liver_core.cuda_driver import BUS_ID_BYTES_MAX, HANDLE_BYTES, PITCH_MAX, CudaDriver, CudaRefused
from liver_core.transport.relay.memory import WORD_BYTES, Block, Held, Place, UnreadableMemory, pieces_of
from liver_core.transport.relay.messages import BYTES_MAX
from liver_core.transport.strides import strided

ALLOCATIONS_MAX = 1 << 14
GPUS_MAX = 64
_REMEDY = (
    "ranks and agent need one PID and one IPC namespace (--pid=host --ipc=host, or one container), one user or an "
    "agent that is root, and the rank's GPU visible to the agent; MIG and WSL may offer no CUDA IPC"
)
_log = logging.getLogger(__name__)


class Gpu:
    """`Memory` of one GPU, as far as ranks have exported it."""

    def __init__(self, driver: CudaDriver, bus_id: str) -> None:
        """Raises CudaRefused."""
        self._driver = driver
        self._device = driver.device_at(bus_id)
        driver.wait_asleep(self._device)
        driver.enter(self._device)
        self._lock = threading.Lock()
        self._opened: Counter[int] = Counter()
        self._bases = np.empty(0, dtype=np.int64)

    def open(self, handle: bytes) -> tuple[int, int]:
        """Where the allocation begins here, and its bytes. Each needs its `close`. Raises UnreadableMemory."""
        try:
            self._driver.enter(self._device)
            base = self._driver.open(handle)
        except CudaRefused as error:
            raise UnreadableMemory(f"the rank's GPU cannot be read: {error}; {_REMEDY}") from None
        with self._lock:
            self._opened[base] += 1
            self._bases = np.array(sorted(self._opened), dtype=np.int64)
        try:
            first, size = self._driver.range_of(base)
        except CudaRefused as error:
            self.close(base)
            raise UnreadableMemory(f"the rank's GPU cannot be read: {error}") from None
        return base, first + size - base

    def close(self, base: int) -> None:
        """Nobody reads there any more."""
        with self._lock:
            self._opened[base] -= 1
            self._opened += Counter()
            self._bases = np.array(sorted(self._opened), dtype=np.int64)
        try:
            self._driver.enter(self._device)
            self._driver.close(base)
        except CudaRefused as error:
            _log.warning("an allocation of a rank stays mapped until the relay ends: %s", error)

    def read(self, places: np.ndarray, block: Block) -> None:
        starts, lengths = places.astype(np.int64).T
        owners = np.searchsorted(self._bases, starts, side="right")
        self._gather(starts, lengths, owners, block, 0)

    def word(self, address: int, block: Block) -> int:
        one = np.array([address], dtype=np.int64)
        self._gather(one, np.array([WORD_BYTES]), one, block, BYTES_MAX)
        return int(block.bytes[BYTES_MAX:].view(np.int64)[0])

    def _gather(self, starts: np.ndarray, lengths: np.ndarray, owners: np.ndarray, block: Block, at: int) -> None:
        """Copy all runs to the block, one behind the other from `at` on, and wait for it."""
        driver = self._driver
        try:
            driver.enter(self._device)
            stream = self._stream(block)
            host = block.bytes.ctypes.data + at
            try:
                for run in strided(starts, lengths, owners):
                    if run.rows == 1:
                        driver.copy(host, run.start, run.bytes, stream)
                    elif run.stride <= PITCH_MAX:
                        driver.copy_rows(host, run.start, run.length, run.rows, run.stride, stream)
                    else:
                        for row in range(run.rows):
                            start = run.start + row * run.stride
                            driver.copy(host + row * run.length, start, run.length, stream)
                    host += run.bytes
            finally:
                driver.wait_for(stream)
        except CudaRefused as error:
            raise UnreadableMemory(f"the rank's GPU cannot be read: {error}") from None

    def _stream(self, block: Block) -> int:
        """This device's for the thread of the block, whose bytes are pinned from then on. Raises CudaRefused."""
        if self._device not in block.streams:
            driver = self._driver
            if not block.pinned:
                host = driver.host_alloc(len(block.bytes))
                block.release.callback(self._quietly, driver.host_free, host)
                block.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * len(block.bytes)).from_address(host))
                block.pinned = True
            stream = driver.make_stream()
            block.release.callback(self._quietly, driver.end_stream, stream)
            block.streams[self._device] = stream
        return block.streams[self._device]

    def _quietly(self, end: Callable[[int], None], what: int) -> None:
        try:
            self._driver.enter(self._device)
            end(what)
        except CudaRefused as error:
            _log.warning("a part of what a reader's thread had of CUDA stays until the relay ends: %s", error)


class Gpus:
    """All that ranks have named. `load`: gives the driver at the first one. For any thread."""

    def __init__(self, load: Callable[[], CudaDriver]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._gpus: dict[str, Gpu] = {}

    def open(self, allocations: Any, held: Held) -> Allocations:
        """Until `held` is closed. `allocations`: PCI bus id of the GPU and handle (hex) of each. Raises
        UnreadableMemory."""
        found: list[tuple[Gpu, int, int]] = []
        if not isinstance(allocations, list) or len(allocations) > ALLOCATIONS_MAX:
            raise UnreadableMemory(f"allocations: a list of at most {ALLOCATIONS_MAX}")
        for each in allocations:
            match each:
                case [str(bus_id), str(text)] if len(bus_id) < BUS_ID_BYTES_MAX and bus_id.isascii():
                    gpu = self._gpu(bus_id)
                    base, size = gpu.open(_handle(text))
                    held.release.callback(gpu.close, base)
                    found.append((gpu, base, size))
                case _:
                    raise UnreadableMemory("an allocation has the bus id of its GPU and a handle")
        return Allocations(found)

    def _gpu(self, bus_id: str) -> Gpu:
        with self._lock:
            if bus_id not in self._gpus:
                if len(self._gpus) >= GPUS_MAX:
                    raise UnreadableMemory(f"more than {GPUS_MAX} GPUs")
                try:
                    self._gpus[bus_id] = Gpu(self._load(), bus_id)
                except CudaRefused as error:
                    text = f"the relay cannot use the rank's GPU {bus_id}: {error}; {_REMEDY}"
                    raise UnreadableMemory(text) from None
            return self._gpus[bus_id]


class Allocations:
    """Those that one endpoint has named: GPU, first address and bytes of each."""

    def __init__(self, found: Sequence[tuple[Gpu, int, int]]) -> None:
        self._found = found

    def place(self, pieces: Any) -> Place:
        """Of a region. `pieces`: offset, bytes and number of the allocation of each. Raises UnreadableMemory for one
        that is not inside its allocation, and for a region on several GPUs."""
        offsets, sizes, numbers = pieces_of(pieces, 3).T
        if (numbers >= len(self._found)).any():
            raise UnreadableMemory(f"a piece lies in allocation {int(numbers.max())} of {len(self._found)}")
        bases, bounds = (np.array([each[at] for each in self._found], dtype=np.uint64)[numbers] for at in (1, 2))
        if (sizes > bounds).any() or (offsets > bounds - np.minimum(sizes, bounds)).any():
            raise UnreadableMemory("a piece of a region ends after its allocation")
        if len(gpus := {self._found[number][0] for number in set(numbers.tolist())}) > 1:
            raise UnreadableMemory("a region lies on one GPU")
        return Place.of(gpus.pop(), np.stack([bases + offsets, sizes], axis=1))


def _handle(text: str) -> bytes:
    try:
        handle = bytes.fromhex(text)
    except ValueError:
        handle = b""
    if len(handle) != HANDLE_BYTES:
        raise UnreadableMemory(f"a handle of CUDA IPC has {HANDLE_BYTES} bytes")
    return handle
