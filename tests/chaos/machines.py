"""The machines of a trial: a service that can be started again, and nodes with any number of slots.

On loopback, or each node on an island of its own that can be cut off. Disks may be small, so that they can be full.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from pyroute2 import netns

from deploy.local.api import Api, until
from deploy.local.cluster import (
    SERVICE,
    SERVICE_ENVIRONMENT,
    SERVICE_START_S,
    Cluster,
    LocalNode,
)
from deploy.local.processes import DemoFailed, Processes, Started
from tests.chaos.clocks import Clocks
from tests.cluster.net_islands import HUB, Islands, address_of
from tests.cluster.slow_islands import SlowIslands

ZYGOTE_MODULE = "agent.supervisor.zygote"
DATABASE_FOLDER = "postgres"
NODE_DISK_BYTES = 64 * 1024 * 1024
DATABASE_DISK_BYTES = 400 * 1024 * 1024
FILLER = "filler"


class Machines(Cluster):
    """As the demo's cluster. `processes` is public here, since the judge asks it what is left. `small_disks`: nodes and
    database get a disk of their own, which `fill_disk` fills."""

    def __init__(
        self,
        folder: Path,
        processes: Processes,
        *,
        islands: Islands | None = None,
        small_disks: bool = False,
        clocks: Clocks | None = None,
    ) -> None:
        super().__init__(folder, processes)
        self.processes = processes
        self.slots: dict[str, int] = {}
        self._agents: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._islands = islands
        self._small_disks = small_disks
        self._clocks = clocks
        self._disks: list[Path] = []

    # Service and database.

    def start_service(self) -> None:
        """On a free port the first time, then on the same port."""
        if not self.url and self._small_disks:
            self._mount(self.folder / DATABASE_FOLDER, DATABASE_DISK_BYTES)
        port = httpx.URL(self.url).port or 0 if self.url else 0
        command = [sys.executable, "-m", "service.cli.main", "serve", "--host", self._address(HUB), "--port", str(port)]
        command += ["--data-dir", str(self.folder)]
        environment = SERVICE_ENVIRONMENT | self._clock_of(SERVICE)
        self.service = self.processes.start(SERVICE, "service", command, environment)

    def await_service(self) -> Api:
        """Its API once it answers. In a trial it has the same priority as everything else."""
        service = self.service
        assert service is not None
        self.url = self.url or until(
            "the start of the service", SERVICE_START_S, lambda: _url_in(service.log), service.check
        )
        until("the service", SERVICE_START_S, lambda: httpx.get(f"{self.url}/readyz").is_success, service.check)
        return Api(self.url, self.folder / "tokens" / "operator.token")

    def restart_service(self) -> None:
        """After it was killed. Returns when it answers."""
        self.start_service()
        self.await_service().close()

    def service_pid(self) -> int | None:
        """Of the running service."""
        service = self.service
        return service.process.pid if service is not None and service.process.poll() is None else None

    def database_pids(self) -> list[int]:
        """The embedded PostgreSQL and its children."""
        path = self.folder / DATABASE_FOLDER / "postmaster.pid"
        try:
            server = psutil.Process(int(path.read_text().split("\n", 1)[0]))
            return [server.pid, *(child.pid for child in server.children(recursive=True))]
        except (OSError, ValueError, psutil.Error):
            return []

    # Nodes.

    def add_node(self, node_id: str, slots: int) -> LocalNode:
        """A node with so many slots."""
        self.slots[node_id] = slots
        if self._small_disks:
            self._mount(self.run_dir(node_id), NODE_DISK_BYTES)
        return self.start_node(node_id)

    def restart_agent(self, node_id: str) -> None:
        """After it was killed, with the same run directory. Does nothing for a node that has been taken away."""
        node = self.nodes.get(node_id)
        if node is not None:
            command, environment = self._agents[node_id]
            self.nodes[node_id] = replace(node, agent=self._start_agent(node_id, command, environment))

    def kill_node(self, node_id: str) -> None:
        """Its machine is gone at once, without a word before."""
        self.nodes.pop(node_id, None)
        self.processes.kill(node_id)

    def agent_pid(self, node_id: str) -> int | None:
        """Of the running agent of a node."""
        node = self.nodes.get(node_id)
        return node.agent.process.pid if node is not None and node.agent.process.poll() is None else None

    def run_dir(self, node_id: str) -> Path:
        """Of the node's agent."""
        return self.folder / "nodes" / node_id

    def journal(self, node_id: str) -> dict[str, dict[str, Any]]:
        """The tables of the node's journal, read without its agent."""
        path = self.run_dir(node_id) / "journal.jsonl"
        return fold_journal(path.read_bytes() if path.exists() else b"")

    # Networks and disks.

    def cut(self, node_id: str) -> None:
        """Cut off a node, or the service if there is no name."""
        assert self._islands is not None
        self._islands.cut(node_id or HUB)

    def join(self, node_id: str) -> None:
        """It can be reached again."""
        assert self._islands is not None
        self._islands.join(node_id or HUB)

    def delay(self, node_id: str, seconds: float) -> None:
        """Packets from and to it take so long."""
        assert isinstance(self._islands, SlowIslands)
        self._islands.late(node_id or HUB, seconds)

    def fill_disk(self, node_id: str) -> None:
        """Of a node, or of the database if there is no name: leave no byte on it."""
        with (self._disk(node_id) / FILLER).open("wb", buffering=0) as filler:
            size = DATABASE_DISK_BYTES
            while size:
                try:
                    filler.write(bytes(size))
                except OSError:
                    size //= 2

    def clear_disk(self, node_id: str) -> None:
        """There is room again."""
        (self._disk(node_id) / FILLER).unlink(missing_ok=True)

    @contextmanager
    def beside(self, node_id: str) -> Iterator[None]:
        """The calling thread is on the node's island meanwhile: it reaches the node also while the hub is cut off."""
        if self._islands is None:
            yield
            return
        netns.pushns(f"{self._islands.prefix}{node_id}")
        try:
            yield
        finally:
            netns.popns()

    def shift_clock(self, node_id: str, seconds: int) -> None:
        """The clock of a node, or of the service if there is no name, is off by so much."""
        assert self._clocks is not None
        self._clocks.shift(node_id or SERVICE, seconds)

    def unmount(self) -> None:
        """Take the small disks away, when all processes have ended."""
        for path in self._disks:
            subprocess.run(["umount", "--lazy", str(path)], check=False)

    def _clock_of(self, name: str) -> dict[str, str]:
        return {} if self._clocks is None else self._clocks.environment(name)

    def _disk(self, node_id: str) -> Path:
        return self.run_dir(node_id) if node_id else self.folder / DATABASE_FOLDER

    def _mount(self, path: Path, size: int) -> None:
        path.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DemoFailed(f"no small disk at {path}: {done.stderr.strip()}")
        self._disks.append(path)

    def _address(self, name: str) -> str:
        return "127.0.0.1" if self._islands is None else address_of(name, self._islands.names)

    def _inside(self, node_id: str, command: list[str]) -> list[str]:
        """The command on the island of a node. It replaces the one that enters, so the process stays the same."""
        if self._islands is None:
            return command
        return ["nsenter", f"--net={self._islands.path_of(node_id)}", "--", *command]

    def _metadata_command(self, node_id: str) -> list[str]:
        command = [*super()._metadata_command(node_id), "--host", self._address(node_id)]
        return self._inside(node_id, command)

    def _start_agent(self, node_id: str, command: list[str], environment: dict[str, str]) -> Started:
        self._agents[node_id] = command, environment
        # The last of two equal options wins.
        options = ["--slots", str(self.slots[node_id]), "--host", self._address(node_id)]
        inside = self._inside(node_id, [*command, *options])
        return super()._start_agent(node_id, inside, environment | self._clock_of(node_id))


def _url_in(log: Path) -> str:
    found = re.search(r"^service: (\S+)$", log.read_text(), re.MULTILINE)
    return found[1] if found else ""


def fold_journal(data: bytes) -> dict[str, dict[str, Any]]:
    """An agent's journal as tables. Pure. Stops at a torn line."""
    tables: dict[str, dict[str, Any]] = {}
    for line in data.split(b"\n"):
        try:
            change = json.loads(line.partition(b" ")[2])
            table = tables.setdefault(change["t"], {})
        except (ValueError, KeyError, TypeError):
            break
        if change["v"] is None:
            table.pop(change["k"], None)
        else:
            table[change["k"]] = change["v"]
    return tables
