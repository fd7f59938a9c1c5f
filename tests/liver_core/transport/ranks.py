"""Runs one scenario on several ranks of one kind of transport: threads for the in-memory one, processes for the others.

The hub between them is the test's own (pipes to the parent), so that the transport under test carries nothing of it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from liver_core.reshard import CopyRuns
from liver_core.transport.mixed import MixedTransport
from liver_core.transport.protocol import Call, Transport, TransportError
from liver_core.transport.relay.local import LocalRelay
from tests.cluster.real_ranks import PRELOAD
from tests.liver_core.transport.in_memory import Fault, FaultKind, InMemoryTransport, MemoryNetwork
from tests.liver_core.transport.relays import RelayProcess

_PROCESSES = (pytest.mark.real,)
KINDS = (
    "memory",  # on threads
    pytest.param("nixl", marks=_PROCESSES),
    pytest.param("torch", marks=_PROCESSES),
    pytest.param("relay", marks=_PROCESSES),
    pytest.param("relay-device", marks=_PROCESSES),  # regions on a GPU, over a model of CUDA's driver
    pytest.param("mixed", marks=(*_PROCESSES, pytest.mark.thorough)),
)

RELAYS = {"relay": "liver_core.transport.relay", "relay-device": "tests.liver_core.transport.modelled_cuda"}
"""Kind to the program of its relay."""


class Run(CopyRuns):
    """Also one that cannot be: a transport must refuse it."""

    def __post_init__(self) -> None:
        return


class Gone(BaseException):
    """Ends the thread of a rank that died."""


@dataclass(slots=True)
class Rank:
    """What a scenario sees: its place, endpoints to make, and a barrier that knows who is still there."""

    kind: str
    rank: int
    size: int
    hub: Connection
    shared: Any
    endpoints: list[Transport] = field(default_factory=list)

    def endpoint(self) -> Transport:
        name = f"rank{self.rank}-{len(self.endpoints)}"
        self.endpoints.append(_make(self.kind, name, self.shared))
        return self.endpoints[-1]

    def exchange(self, data: bytes = b"") -> list[bytes | None]:
        """Everybody's data by rank; None for a rank that is gone, stalled or finished. Also a barrier."""
        self.hub.send(("exchange", data))
        return self.hub.recv()

    def die(self) -> None:
        if self.kind != "memory":
            os.kill(os.getpid(), signal.SIGKILL)
        self._inject(FaultKind.DIE)
        self.hub.send(("dead", None))
        raise Gone

    def stall(self) -> None:
        """Stop for good without closing anything; the others go on without this rank."""
        if self.kind == "memory":
            self._inject(FaultKind.DROP)
        self.hub.send(("stalled", None))
        if self.kind != "memory":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise Gone

    def _inject(self, kind: FaultKind) -> None:
        for endpoint in self.endpoints:
            self.shared.inject(endpoint.name, Fault(kind))


Scenario = Callable[[Rank], Any]


def run_ranks(kind: str, size: int, scenario: Scenario, limit_s: float = 90.0) -> list[Any]:
    """Results by rank, None for a rank that died or stalled. Raises AssertionError with the traceback of a failure."""
    if kind == "memory":
        pipes = [multiprocessing.Pipe() for _ in range(size)]
        network = MemoryNetwork()
        threads = [
            threading.Thread(target=_main, args=(scenario, Rank(kind, rank, size, pipes[rank][1], network)))
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        try:
            return _serve([parent for parent, _ in pipes], [], limit_s)
        finally:
            for thread in threads:
                thread.join(5)
    if kind in RELAYS:
        with RelayProcess(module=RELAYS[kind]) as relay:
            return _on_processes(kind, size, scenario, limit_s, relay.local)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
    return _on_processes(kind, size, scenario, limit_s, store.port)


def _on_processes(kind: str, size: int, scenario: Scenario, limit_s: float, shared: Any) -> list[Any]:
    pipes = [multiprocessing.Pipe() for _ in range(size)]
    context: Any = multiprocessing.get_context("fork")
    if "<" not in getattr(scenario, "__qualname__", "<partial>"):
        # A fork of this process has the locks that its threads held just then. What can be pickled starts clean.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
    ranks = [Rank(kind, rank, size, pipes[rank][1], shared) for rank in range(size)]
    processes = [context.Process(target=_main, args=(scenario, rank), daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    try:
        return _serve([parent for parent, _ in pipes], [process.sentinel for process in processes], limit_s)
    finally:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join(5)


def _make(kind: str, name: str, shared: Any) -> Transport:
    """Imports here: an agent or a process group must not exist in the parent that forks."""
    if kind == "memory":
        return InMemoryTransport(name, shared)
    if kind == "relay-device":
        return _relayed_from_device(name, LocalRelay(shared))
    if kind == "relay":
        from liver_core.transport.relay.transport import RelayTransport

        return RelayTransport(name, LocalRelay(shared))
    if kind.startswith("nixl"):
        if kind == "nixl-tcp":  # As between nodes without RDMA, where UCX could only emulate reads.
            os.environ["UCX_TLS"] = "tcp"
        from liver_core.transport.nixl import NixlTransport
        from liver_core.transport.ucx import Ucx

        return NixlTransport(name, Ucx("lo", host_memory_only=kind != "nixl-tcp"))
    from liver_core.transport.gloo import TorchDistributedTransport

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", shared, is_master=False, timeout=timedelta(seconds=20))

    far = TorchDistributedTransport(name, connect)
    return far if kind == "torch" else MixedTransport(name, {"nixl": _neighbours_only(name), "gloo": far})


def _relayed_from_device(name: str, local: LocalRelay) -> Transport:
    """From now on all regions of this process count as a GPU's, at both ends of a read."""
    from liver_core.transport import landing_blocks
    from liver_core.transport.relay import links, transport
    from tests.liver_core.transport.modelled_cuda import ModelledCuda

    transport.memory_of = lambda memory: "VRAM"
    links.is_host = landing_blocks.is_host = lambda device: False
    return transport.RelayTransport(name, local, ModelledCuda)


def _neighbours_only(name: str) -> Transport:
    """NIXL that cannot reach every other rank, as if they were on another machine."""
    from liver_core.transport.nixl import NixlTransport
    from liver_core.transport.ucx import Ucx

    class Neighbours(NixlTransport):
        def connect(self, peer: int, address: bytes, deadline: float) -> None:
            if peer % 2:
                raise TransportError(Call.CONNECT, "on another machine", peer=peer)
            super().connect(peer, address, deadline)

    return Neighbours(name, Ucx("lo"))


def _main(scenario: Scenario, rank: Rank) -> None:
    if rank.kind != "memory":
        torch.set_num_threads(1)
    if rank.kind == "nixl-tcp":
        faulthandler.disable()  # UCX may abort a source here, and that is expected.
    try:
        answer = ("done", scenario(rank))
    except Gone:
        return
    except BaseException:
        answer = ("failed", f"rank {rank.rank} of {rank.size} on {rank.kind}:\n{traceback.format_exc()}")
    for endpoint in rank.endpoints:
        endpoint.close()
    rank.hub.send(answer)


def _serve(hubs: list[Connection], sentinels: list[int], limit_s: float) -> list[Any]:
    size = len(hubs)
    deadline = time.monotonic() + limit_s
    results: list[Any] = [None] * size
    live = set(range(size))
    offers: dict[int, bytes] = {}
    while live:
        left = deadline - time.monotonic()
        assert left > 0, f"ranks {sorted(live)} did not end in {limit_s} s"
        watched: dict[Any, int] = {hubs[rank]: rank for rank in live} | {
            sentinel: rank for rank, sentinel in enumerate(sentinels) if rank in live
        }
        for ready in wait(list(watched), left):
            rank = watched[ready]
            if not hubs[rank].poll():
                live.discard(rank)  # Its process ended without a word.
                continue
            what, value = hubs[rank].recv()
            if what == "exchange":
                offers[rank] = value
                continue
            live.discard(rank)
            assert what != "failed", value
            results[rank] = value
        if live and live <= offers.keys():
            answer = [offers[rank] if rank in live else None for rank in range(size)]
            for rank in live:
                hubs[rank].send(answer)
            offers.clear()
    return results
