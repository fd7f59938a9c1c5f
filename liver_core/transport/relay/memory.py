"""Reads of the memory of another process of this machine, without its help (process_vm_readv, Linux 3.2).

The kernel allows it to who may trace that process: its user, where Yama does not forbid it, or CAP_SYS_PTRACE.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from liver_core.transport.protocol import Guard
from liver_core.transport.relay.messages import BYTES_MAX, Request
from liver_core.transport.relay.rank_user import RankUser

IOV_MAX = 1024
WORD_BYTES = 8
COUNTERS_MAX = 64
"""So many addresses of counters are kept."""
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


_readv: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_readv.restype = ctypes.c_ssize_t


class UnreadableMemory(Exception):
    """What was asked for cannot be read. The text says why."""


class Block:
    """Host memory in which one thread gathers what it sends. `bytes`: uint8, BYTES_MAX and a word for counters, which a
    device replaces by memory that it writes to itself. `streams`: by device. `with` releases what devices gave."""

    def __init__(self) -> None:
        self.bytes = np.empty(BYTES_MAX + WORD_BYTES, dtype=np.uint8)
        self.pinned = False
        self.streams: dict[int, int] = {}
        self.release = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release.close()


class Memory(Protocol):
    """Of a process, or of a device that processes share. For any thread, each with a block of its own."""

    def read(self, places: np.ndarray, block: Block) -> None:
        """Fill the block's bytes from `places`: uint64 (runs, 2) of address and length. Raises UnreadableMemory."""
        ...

    def word(self, address: int, block: Block) -> int:
        """The int64 there. As `read`; the bytes that were read stay."""
        ...


class ProcessMemory:
    """`Memory` of the host, of one process as long as it lives and is `user`'s. Believe nothing that was read before
    `check_lives`: the number may have become another process's."""

    def __init__(self, pid: int, user: RankUser) -> None:
        """Raises UnreadableMemory if there is no such process."""
        self.pid, self._user = pid, user
        try:
            self._process = open(os.pidfd_open(pid), buffering=0, mode="rb")  # noqa: SIM115 (closed with its last reader)
        except OSError as error:
            raise UnreadableMemory(f"there is no process {pid}: {error.strerror}") from None

    def read(self, places: np.ndarray, block: Block) -> None:
        address, done = block.bytes.ctypes.data, 0
        for start in range(0, len(places), IOV_MAX):
            part = np.ascontiguousarray(places[start : start + IOV_MAX])
            size = int(part[:, 1].sum()) if len(part) > 1 else int(part[0, 1])
            self._read(part.ctypes.data, len(part), address + done, size)
            done += size

    def word(self, address: int, block: Block) -> int:
        value, remote = ctypes.c_int64(), _IoVec(address, 8)
        self._read(ctypes.addressof(remote), 1, ctypes.addressof(value), 8)
        return value.value

    def _read(self, remote: int, count: int, address: int, size: int) -> None:
        """By the `count` iovecs at `remote`, to so many bytes at `address`."""
        try:
            self._user.enter()
        except OSError as error:
            text = f"the relay cannot read as the ranks' user {self._user.uid}: {error.strerror or error}"
            raise UnreadableMemory(text) from None
        got = _readv(self.pid, ctypes.byref(_IoVec(address, size)), 1, remote, count, 0)
        if got != size:
            raise UnreadableMemory(_why_not(self.pid, self._user, ctypes.get_errno() if got < 0 else 0))

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        return not ended.poll(0)

    def check_lives(self) -> None:
        """Raises UnreadableMemory if the process has ended."""
        if not self.lives:
            raise UnreadableMemory(f"process {self.pid} has ended")


def _why_not(pid: int, user: RankUser, number: int) -> str:
    if not number:
        return f"process {pid} has released a part of what was to be read"
    text = f"the memory of process {pid} cannot be read: {os.strerror(number)}"
    if number != 1:  # EPERM
        return text
    scope = int(_YAMA.read_text()) if _YAMA.exists() else 0
    if user.uid != os.geteuid():
        lower = f"set kernel.yama.ptrace_scope to 1 (it is {scope})"
        return f"{text}; {lower if scope > 1 else f'it is not a process of user {user.uid} alone'}"
    remedy = f"set kernel.yama.ptrace_scope=0 (it is {scope})" if scope else "run it as the ranks' user"
    return f"{text}; {remedy}, or give the agent CAP_SYS_PTRACE"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a region's bytes lie: piece after piece, each from `starts` of the region at `bases` in `memory`."""

    memory: Memory
    starts: np.ndarray
    bases: np.ndarray
    size: int

    @staticmethod
    def of(memory: Memory, pieces: Sequence[Sequence[int]] | np.ndarray) -> Place:
        """`pieces`: address and bytes of each. Raises UnreadableMemory for what is no memory."""
        table = pieces_of(pieces, 2)
        sizes = table[:, 1].astype(np.int64)
        if (sizes < 0).any() or int(sizes.astype(object).sum()) >= 1 << 62:
            raise UnreadableMemory("no piece of a region is that large")
        ends = np.cumsum(sizes)
        return Place(memory, ends - sizes, table[:, 0], int(ends[-1]))

    def located(self, table: np.ndarray) -> np.ndarray:
        """uint64 (runs, 2) of address and length. Raises UnreadableMemory for a run that is not inside one piece."""
        offsets, lengths = table[:, 0], table[:, 1]
        if len(self.starts) == len(table) == 1 and 0 <= offsets[0] <= self.size - lengths[0] and lengths[0] > 0:
            return np.array([[int(self.bases[0]) + int(offsets[0]), lengths[0]]], dtype=np.uint64)
        pieces = np.searchsorted(self.starts, offsets, side="right") - 1
        ends = np.append(self.starts[1:], self.size)[pieces]
        if offsets.min() < 0 or lengths.min() < 1 or (offsets > ends - lengths).any():
            raise UnreadableMemory(f"a run is not inside one piece of the region, which has {self.size} bytes")
        found = np.empty((len(table), 2), dtype=np.uint64)
        found[:, 0] = self.bases[pieces] + (offsets - self.starts[pieces]).astype(np.uint64)
        found[:, 1] = lengths
        return found


def pieces_of(pieces: Any, columns: int) -> np.ndarray:
    """uint64 (pieces, columns), one piece or more. Raises UnreadableMemory for what is no such table."""
    try:
        table = np.array(pieces, dtype=np.uint64).reshape(len(pieces), columns)
    except (OverflowError, TypeError, ValueError) as error:
        raise UnreadableMemory(f"not the pieces of a region: {error}") from None
    if not len(table):
        raise UnreadableMemory("a region has one piece or more")
    return table


class Held:
    """What an endpoint holds open while it is served. `release` ends it: at `close`, or after the last read of then."""

    def __init__(self) -> None:
        self.release = ExitStack()
        self._lock = threading.Lock()
        self._reads = 0
        self._closed = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A read, during which all stays open. Raises UnreadableMemory after `close`."""
        with self._lock:
            if self._closed:
                raise UnreadableMemory("its rank has left")
            self._reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads -= 1
            self._release_unused()

    def close(self) -> None:
        """Waits for nobody."""
        with self._lock:
            self._closed = True
        self._release_unused()

    def _release_unused(self) -> None:
        with self._lock:
            release = self.release.pop_all() if self._closed and not self._reads else ExitStack()
        release.close()


@dataclass(frozen=True, slots=True)
class ServedRank:
    """An endpoint of a rank whose regions are read. `read` may be called from any thread. `counters`: addresses of
    guards that were asked for."""

    process: ProcessMemory
    places: Mapping[str, Place]
    held: Held = field(default_factory=Held)
    counters: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    @property
    def pieces(self) -> int:
        """Of all regions together."""
        return sum(len(place.bases) for place in self.places.values())

    def read(self, request: Request, block: Block) -> tuple[bool, int]:
        """Fill the block with the request's bytes: whether the guard held, and what its counter was.

        Raises UnreadableMemory for a region, a run or a guard that there is not.
        """
        place = self._place(request.kind)
        places = place.located(request.table)
        with self.held.reading():
            held, value = self._look(request.guard, block)
            if held:
                place.memory.read(places, block)
                if request.guard is not None:
                    held, value = self._look(request.guard, block)
        self.process.check_lives()
        return held, value

    def _look(self, guard: Guard | None, block: Block) -> tuple[bool, int]:
        """Whether it holds now, and what its counter is."""
        if guard is None:
            return True, 0
        value = self._place(guard.kind).memory.word(self._counter(guard), block)
        return value == guard.value, value

    def _counter(self, guard: Guard) -> int:
        """Where it lies in the process."""
        key = guard.kind, guard.index
        if (known := self.counters.get(key)) is not None:
            return known
        place = self._place(guard.kind)
        if not 0 <= guard.index < place.size // 8:
            raise UnreadableMemory(f"{guard.kind!r} has no element {guard.index}")
        found = int(place.located(np.array([[8 * guard.index, 8]]))[0, 0])
        if len(self.counters) < COUNTERS_MAX:
            self.counters[key] = found
        return found

    def _place(self, kind: str) -> Place:
        if kind not in self.places:
            raise UnreadableMemory(f"no region {kind[:64]!r} at this endpoint")
        return self.places[kind]
