"""Whose memory a thread of the relay may read: that of the rank's user alone, also where the relay is root's.

A process number says nothing for long: it may pass to another process, and a process may become another user's by what
it executes. So the kernel has to look at every read. It does where the thread has the rank's user and group as its real
ones, and no CAP_SYS_PTRACE (ptrace(2), "Ptrace access mode checking").
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from dataclasses import dataclass
from typing import Any

_CALLS = {"x86_64": (117, 119), "aarch64": (147, 149)}
"""setresuid and setresgid of one thread: those of glibc change all threads."""
_KEEP = -1
_CAPABILITIES_3, _SYS_PTRACE = 0x20080522, 19  # linux/capability.h
_SETS = struct.Struct("6I")
_libc: Any = ctypes.CDLL(None, use_errno=True)
_thread = threading.local()


@dataclass(frozen=True, slots=True)
class RankUser:
    """User and group of a rank, as the kernel tells them of its connection."""

    uid: int
    gid: int

    def enter(self) -> None:
        """Have this thread read as that user from now on. Nothing changes in a relay of that user's own, which may be
        allowed more (CAP_SYS_PTRACE). Raises OSError."""
        now = getattr(_thread, "user", None)
        if now == self or (now is None and self.uid == os.geteuid()):
            return
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(f"how a thread changes its user on {platform.machine()} is not known here")
        _thread.user = None
        _drop_ptrace()
        for call, number in zip(calls, (self.uid, self.gid), strict=True):
            if _libc.syscall(call, number, _KEEP, _KEEP):
                raise _error()
        _thread.user = self


def allow(pid: int) -> None:
    """Where Yama lets only ancestors read a process, let this one be read by that process too (prctl(2),
    PR_SET_PTRACER). Nothing happens without Yama, or where the other process has no number here."""
    if pid > 0:
        _libc.prctl(0x59616D61, ctypes.c_ulong(pid), *map(ctypes.c_ulong, (0, 0, 0)))


def _drop_ptrace() -> None:
    """Of this thread, for good."""
    header = struct.pack("Ii", _CAPABILITIES_3, 0)
    sets = ctypes.create_string_buffer(_SETS.size)
    if _libc.capget(header, sets):
        raise _error()
    effective, permitted, *rest = _SETS.unpack(sets.raw)
    kept = ~(1 << _SYS_PTRACE)
    if _libc.capset(header, _SETS.pack(effective & kept, permitted & kept, *rest)):
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
