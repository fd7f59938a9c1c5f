"""What is left of a job that has ended: processes, sockets, and entries of /dev/shm that its processes had open."""

from __future__ import annotations

import os
from pathlib import Path

from tests.chaos.machines import ZYGOTE_MODULE, Machines

SHM = "/dev/shm/"


class Remains:
    """`look` while the job runs, to learn which shared memory is its own; `left` once it has ended."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._shared: set[str] = set()

    def look(self) -> None:
        """Note the shared memory that processes of nodes use now."""
        for node in tuple(self._machines.nodes):
            for pid in self._machines.processes.marked(node):
                self._shared |= _shared_memory(pid)

    def left(self) -> list[str]:
        """What should not be there any more, each in a few words."""
        found = [f"/dev/shm: {Path(name).name}" for name in sorted(self._shared) if Path(name).exists()]
        for node in tuple(self._machines.nodes):
            found += [f"{node}: {text}" for text in self._left_on(node)]
        return found

    def _left_on(self, node: str) -> list[str]:
        machines = self._machines
        kept = machines.nodes[node]
        zygote = machines.journal(node).get("zygote", {}).get("zygote", {}).get("pid")
        expected = {kept.agent.process.pid, kept.imds.process.pid, zygote}
        pids = [pid for pid in machines.processes.marked(node) if pid not in expected]
        left = [_named(pid) for pid in pids]
        sockets = [path for path in (machines.run_dir(node) / "s").glob("*.sock") if path.name != "z.sock"]
        return left + [f"socket {path.name}" for path in sockets]


def _named(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        command = "ended"
    # Ranks and stores are forks of the zygote and have its command line.
    return f"process {pid} ({'zygote, rank or store' if ZYGOTE_MODULE in command else command[:80]})"


def _shared_memory(pid: int) -> set[str]:
    """Files of /dev/shm that a process has mapped or open. Empty for one that has ended."""
    found: set[str] = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if SHM in line and not line.endswith("(deleted)"):
                found.add(line[line.index(SHM) :])
        for entry in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(entry.path)
            if target.startswith(SHM) and not target.endswith("(deleted)"):
                found.add(target)
    except OSError:
        return found
    return found
