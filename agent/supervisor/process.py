"""Identifies a process by pid and start time and signals it through a pidfd. Does not start processes.

A bare pid is never trusted: the kernel may have given it to another process since.
"""

import os
import select
import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LISTENER_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`start_time` is field 22 of /proc/<pid>/stat: clock ticks since boot."""

    pid: int
    start_time: float

    def to_json(self) -> dict[str, Any]:
        """For the journal and the zygote's socket."""
        return {"pid": self.pid, "start_time": self.start_time}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ProcessIdentity":
        """Raises KeyError or ValueError on anything else."""
        return cls(int(data["pid"]), float(data["start_time"]))


def read_start_time(pid: int) -> float | None:
    """Start time of a running process; None if it has ended, also if it is not reaped yet."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else float(fields[19])


def is_stopped(identity: ProcessIdentity) -> bool:
    """Whether exactly this process is stopped, by a signal or a debugger."""
    fields = _stat(identity.pid)
    return fields is not None and fields[0] in (b"T", b"t") and float(fields[19]) == identity.start_time


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/<pid>/stat from the third on, which is the state; None without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name may contain spaces and parentheses; the other fields follow the last closing parenthesis.
    return stat[stat.rindex(b")") + 2 :].split()


UNKNOWN = ProcessIdentity(0, 0.0)


def listener_of(socket_path: str) -> ProcessIdentity | None:
    """The process that listens at a unix socket; None if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(LISTENER_S)
        try:
            client.connect(socket_path)
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    pid = struct.unpack("3i", credentials)[0]
    start_time = read_start_time(pid)
    return None if start_time is None else ProcessIdentity(pid, start_time)


def own_identity() -> ProcessIdentity:
    """The calling process."""
    start_time = read_start_time(os.getpid())
    assert start_time is not None, "a running process is in /proc"
    return ProcessIdentity(os.getpid(), start_time)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process runs."""
    return read_start_time(identity.pid) == identity.start_time


def open_pidfd(identity: ProcessIdentity) -> int | None:
    """A descriptor that becomes readable when the process ends; None when it has ended. The caller closes it."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError:
        return None
    # The descriptor stays bound to the process that has the pid now, so checking after opening leaves no gap.
    if is_alive(identity):
        return descriptor
    os.close(descriptor)
    return None


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it has ended."""
    descriptor = open_pidfd(identity)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_end(identity: ProcessIdentity, timeout_s: float) -> bool:
    """Block until the process has ended; False when it still runs after `timeout_s`."""
    descriptor = open_pidfd(identity)
    if descriptor is None:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)
