"""Reads of the memory of another process of this machine, without its help (process_vm_readv, Linux 3.2).

The kernel allows it to who may trace that process: the same user where Yama does not forbid it, or CAP_SYS_PTRACE.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from liver_core.transport.protocol import Guard
from liver_core.transport.relay.messages import Request

IOV_MAX = 1024
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


class ProcessMemory:
    """Of one process, as long as it lives."""

    def __init__(self, pid: int) -> None:
        """Raises UnreadableMemory if there is no such process."""
        self.pid = pid
        try:
            self._process = open(os.pidfd_open(pid), buffering=0, mode="rb")  # noqa: SIM115 (closed with its last reader)
        except OSError as error:
            raise UnreadableMemory(f"there is no process {pid}: {error.strerror}") from None

    def read(self, places: np.ndarray, into: np.ndarray) -> None:
        """Fill `into` (uint8) from `places`: uint64 (runs, 2) of address and length. Raises UnreadableMemory.

        Believe nothing of it before `check_lives`: the number may have become another process's.
        """
        address, done = into.ctypes.data, 0
        for start in range(0, len(places), IOV_MAX):
            part = np.ascontiguousarray(places[start : start + IOV_MAX])
            size = int(part[:, 1].sum()) if len(part) > 1 else int(part[0, 1])
            self._read(part.ctypes.data, len(part), address + done, size)
            done += size

    def word(self, address: int) -> int:
        """The int64 there. As `read`."""
        value, remote = ctypes.c_int64(), _IoVec(address, 8)
        self._read(ctypes.addressof(remote), 1, ctypes.addressof(value), 8)
        return value.value

    def _read(self, remote: int, count: int, address: int, size: int) -> None:
        """By the `count` iovecs at `remote`, to so many bytes at `address`."""
        got = _readv(self.pid, ctypes.byref(_IoVec(address, size)), 1, remote, count, 0)
        if got != size:
            raise UnreadableMemory(_why_not(self.pid, ctypes.get_errno() if got < 0 else 0))

    def check_lives(self) -> None:
        """Raises UnreadableMemory if the process has ended."""
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        if ended.poll(0):
            raise UnreadableMemory(f"process {self.pid} has ended")


def _why_not(pid: int, number: int) -> str:
    if not number:
        return f"process {pid} has released a part of what was to be read"
    text = f"the memory of process {pid} cannot be read: {os.strerror(number)}"
    if number != 1:  # EPERM
        return text
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    remedy = f"set kernel.yama.ptrace_scope=0 (it is {scope}), or" if scope != "0" else "run it as the ranks' user, or"
    return f"{text}; {remedy} give the agent CAP_SYS_PTRACE"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a region's bytes lie: piece after piece, each from `starts` of the region at `bases` in memory."""

    starts: np.ndarray
    bases: np.ndarray
    size: int

    @staticmethod
    def of(pieces: Sequence[Sequence[int]]) -> Place:
        """`pieces`: address and bytes of each. Raises UnreadableMemory for what is no memory."""
        try:
            table = np.array(pieces, dtype=np.uint64).reshape(len(pieces), 2)
        except (OverflowError, TypeError, ValueError) as error:
            raise UnreadableMemory(f"not the pieces of a region: {error}") from None
        sizes = table[:, 1].astype(np.int64)
        if not len(table) or (sizes < 0).any() or int(sizes.astype(object).sum()) >= 1 << 62:
            raise UnreadableMemory("a region has one piece or more, and none is that large")
        ends = np.cumsum(sizes)
        return Place(ends - sizes, table[:, 0], int(ends[-1]))

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


@dataclass(frozen=True, slots=True)
class ServedRank:
    """An endpoint of a rank whose regions are read. `read` may be called from any thread. `counters`: addresses of
    guards that were asked for."""

    memory: ProcessMemory
    places: Mapping[str, Place]
    counters: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def read(self, request: Request, into: np.ndarray) -> tuple[bool, int]:
        """Fill `into` (uint8, as long as the request's bytes): whether the guard held, and what its counter was.

        Raises UnreadableMemory for a region, a run or a guard that there is not.
        """
        places = self._place(request.kind).located(request.table)
        held, value = True, 0
        if request.guard is None:
            self.memory.read(places, into)
        else:
            counter = self._counter(request.guard)
            value = self.memory.word(counter)
            held = value == request.guard.value
            if held:
                self.memory.read(places, into)
                value = self.memory.word(counter)
                held = value == request.guard.value
        self.memory.check_lives()
        return held, value

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
