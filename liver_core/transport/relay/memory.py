"""Reads of the memory of another process of this machine, without its help (process_vm_readv, Linux 3.2).

The kernel allows it to who may trace that process: the same user where Yama does not forbid it, or CAP_SYS_PTRACE.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from liver_core.transport.protocol import Guard
from liver_core.transport.relay.messages import Request

IOV_MAX = 1024
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_libc: Any = ctypes.CDLL(None, use_errno=True)


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
        """Fill `into` (uint8) from `places`: uint64 (runs, 2) of address and length. Raises UnreadableMemory."""
        address, done = into.ctypes.data, 0
        for start in range(0, len(places), IOV_MAX):
            part = np.ascontiguousarray(places[start : start + IOV_MAX])
            size = int(part[:, 1].sum())
            local = np.array([address + done, size], dtype=np.uint64)
            got = _libc.process_vm_readv(
                self.pid,
                ctypes.c_void_p(local.ctypes.data),
                ctypes.c_ulong(1),
                ctypes.c_void_p(part.ctypes.data),
                ctypes.c_ulong(len(part)),
                ctypes.c_ulong(0),
            )
            if got != size:
                raise UnreadableMemory(_why_not(self.pid, ctypes.get_errno() if got < 0 else 0))
            done += size
        # The number may be another process's by now, and what was read that one's.
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
    """An endpoint of a rank whose regions are read. `read` may be called from any thread."""

    memory: ProcessMemory
    places: Mapping[str, Place]

    def read(self, request: Request, into: np.ndarray) -> tuple[bool, int]:
        """Fill `into` (uint8, as long as the request's bytes): whether the guard held, and what its counter was.

        Raises UnreadableMemory for a region, a run or a guard that there is not.
        """
        places = self._place(request.kind).located(request.table)
        if request.guard is None:
            self.memory.read(places, into)
            return True, 0
        before = self._value(request.guard)
        if before != request.guard.value:
            return False, before
        self.memory.read(places, into)
        after = self._value(request.guard)
        return after == before, after

    def _value(self, guard: Guard) -> int:
        place = self._place(guard.kind)
        if not 0 <= guard.index < place.size // 8:
            raise UnreadableMemory(f"{guard.kind!r} has no element {guard.index}")
        found = np.empty(8, dtype=np.uint8)
        self.memory.read(place.located(np.array([[8 * guard.index, 8]])), found)
        return int(found.view(np.int64)[0])

    def _place(self, kind: str) -> Place:
        if kind not in self.places:
            raise UnreadableMemory(f"no region {kind[:64]!r} at this endpoint")
        return self.places[kind]
