"""Starts every process of a demo in a session of its own and ends it by pid, also if it outlives its parent.

Ranks, zygotes and stores outlive their agent by design. Every process of a demo has the mark of its group in its
environment, and ending a group ends every process with its mark.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "LIVER_DEMO_MARK"
TERMINATE_S = 10.0
KILL_S = 5.0
POLL_S = 0.02
TAIL_LINES = 5


class DemoFailed(Exception):
    """The demo cannot continue, or a bound is broken; the text says why and where to look."""


@dataclass(frozen=True, slots=True)
class Started:
    """One process. `log` has its standard output and error."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raises DemoFailed with the end of its log when it has ended."""
        code = self.process.poll()
        if code is not None:
            raise DemoFailed(f"{self.name} ended with status {code}: {tail(self.log)} (log: {self.log})")


class Processes:
    """What this demo has started. `close` ends all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = uuid.uuid4().hex
        self._groups: dict[str, list[Started]] = {}

    def start(
        self,
        group: str,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> Started:
        """Start one process of a group, with its output in a log of its own."""
        # Register the group before the start: an interrupt in the middle of it must not leave a process behind.
        self._groups.setdefault(group, [])
        log = self._folder / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("LIVER_")}
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**inherited, **(environment or {}), MARK: self._mark(group), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        started = Started(name, process, log)
        self._groups[group].append(started)
        return started

    def finish(self, started: Started, timeout_s: float) -> None:
        """Wait for a process that ends by itself. Raises DemoFailed when it fails or takes too long."""
        try:
            code = started.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{started.name} did not end within {timeout_s:.0f} s (log: {started.log})") from None
        if code != 0:
            raise DemoFailed(f"{started.name} ended with status {code}: {tail(started.log)} (log: {started.log})")

    def end(self, group: str) -> None:
        """End a group: terminate its own processes, so that they can clean up, then kill all others with its mark."""
        started = self._groups.get(group, [])
        for item in started:
            with suppress(ProcessLookupError):
                item.process.terminate()
        deadline = time.monotonic() + TERMINATE_S
        for item in started:
            with suppress(subprocess.TimeoutExpired):
                item.process.wait(max(0.1, deadline - time.monotonic()))
        self.kill(group)

    def kill(self, group: str) -> None:
        """End a group as a machine ends: kill every process with its mark, without a word before."""
        started = self._groups.pop(group, [])
        self._kill_marked(group)
        for item in started:
            with suppress(subprocess.TimeoutExpired):
                item.process.wait(KILL_S)

    def close(self) -> None:
        """End everything, the newest group first. All get SIGTERM before any is waited for: they end in parallel."""
        for started in reversed([item for group in self._groups.values() for item in group]):
            with suppress(ProcessLookupError):
                started.process.terminate()
        for group in reversed(list(self._groups)):
            self.end(group)

    def lower_priority(self, group: str, nice: int) -> None:
        """Lower the processor priority of every process of a group, and of those that they start later.

        Linux may put every session into a scheduling group of its own (sched(7), autogroup). Then a process's nice
        value counts only within its session, and the session's nice value counts between sessions.
        """
        for pid in self.marked(group):
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, pid, nice)
            with suppress(OSError):  # No such file where the kernel has no such groups.
                Path(f"/proc/{pid}/autogroup").write_text(str(nice))

    def marked(self, group: str) -> list[int]:
        """Living processes that carry the mark of a group."""
        wanted = f"{MARK}={self._mark(group)}".encode()
        return [pid for pid in _pids() if wanted in _environment(pid)]

    def _kill_marked(self, group: str) -> None:
        deadline = time.monotonic() + KILL_S
        while pids := self.marked(group):
            for pid in pids:
                self._kill(pid, group)
            if time.monotonic() > deadline:
                raise DemoFailed(f"processes {pids} of {group} could not be ended")
            time.sleep(POLL_S)

    def _kill(self, pid: int, group: str) -> None:
        """Kill by pidfd, after checking the mark again: the pid may belong to another process by now."""
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                if f"{MARK}={self._mark(group)}".encode() in _environment(pid):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    def _mark(self, group: str) -> str:
        return f"{self._run}/{group}"


def tail(log: Path) -> str:
    """The last lines of a log, in one line."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no output"
    return " | ".join(lines[-TAIL_LINES:]) or "no output"


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def _environment(pid: int) -> list[bytes]:
    """The environment a process was started with; forked children have their parent's. Empty for one that ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
