"""Transport between endpoints of one process: a registry instead of a wire, with faults that a test can order."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from liver_core.device.region import AnyRegion, Region
from liver_core.transport.protocol import Call, PeerReport, Read, ReadReport, TransportError, TransportTimeout
from liver_core.transport.regions import Address, Regions, RegionSpec, check_reads, copy_runs


class FaultKind(StrEnum):
    DELAY = "delay"
    """Every answer comes `seconds` late."""
    DROP = "drop"
    """No answer comes: the reader waits until its deadline."""
    DIE = "die"
    """The endpoint is gone: the reader is told at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    seconds: float = 0.0


class MemoryNetwork:
    """What the endpoints of one process share. `inject` makes the endpoint of that name misbehave as a source."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._endpoints: dict[str, InMemoryTransport] = {}
        self._faults: dict[str, Fault] = {}

    def attach(self, endpoint: InMemoryTransport) -> None:
        with self._lock:
            if endpoint.name in self._endpoints:
                raise TransportError(Call.REGISTER, f"an endpoint named {endpoint.name!r} exists already")
            self._endpoints[endpoint.name] = endpoint

    def detach(self, name: str) -> None:
        with self._lock:
            self._endpoints.pop(name, None)
            self._lock.notify_all()

    def inject(self, name: str, fault: Fault | None) -> None:
        """Give the endpoint `name` a fault, or with None take it away; waiting readers notice at once."""
        with self._lock:
            if fault is None:
                self._faults.pop(name, None)
            else:
                self._faults[name] = fault
            self._lock.notify_all()

    def answer(self, name: str, deadline: float) -> InMemoryTransport | None:
        """The endpoint once it answers, None when it is gone; raises TimeoutError at the deadline."""
        asked = time.monotonic()
        with self._lock:
            while True:
                endpoint, fault = self._endpoints.get(name), self._faults.get(name)
                if endpoint is None or (fault and fault.kind is FaultKind.DIE):
                    return None
                late = fault.seconds if fault and fault.kind is FaultKind.DELAY else 0.0
                dropped = fault is not None and fault.kind is FaultKind.DROP
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(f"no answer from {name!r}")
                if not dropped and now >= asked + late:
                    return endpoint
                self._lock.wait((deadline if dropped else min(deadline, asked + late)) - now)


class InMemoryTransport:
    """One endpoint on a `MemoryNetwork`. Needs no progress: the reader copies out of the source's memory itself."""

    one_sided = True
    two_sided_because = ""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        self.name = name
        self._network = network
        self._regions = Regions()
        self._peers: dict[int, Address] = {}
        self._open = True
        network.attach(self)

    def guards(self, peer: int) -> bool:
        return False

    def register(
        self,
        *,
        sources: Mapping[str, AnyRegion] | None = None,
        targets: Mapping[str, AnyRegion] | None = None,
    ) -> None:
        self._check_open(Call.REGISTER)
        self._regions.add(*self._regions.added(sources, targets))

    def address(self) -> bytes:
        self._check_open(Call.REGISTER)
        self._regions.published = True
        return Address("memory", self.name, self._regions.source_specs()).encode()

    def start_progress(self) -> None:
        self._check_open(Call.SERVE)

    def calm(self) -> None:
        return

    def stop_progress(self) -> None:
        return

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        self._check_open(Call.CONNECT)
        decoded = Address.decode(address, "memory", peer)
        known = self._peers.get(peer)
        if known is not None and known != decoded:
            raise TransportError(Call.CONNECT, f"the number is taken by {known.name!r}", peer=peer)
        self._answer(Call.CONNECT, peer, decoded.name, deadline)
        self._peers[peer] = decoded

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        self._check_open(Call.READ)
        specs: dict[int, Mapping[str, RegionSpec]] = {peer: known.regions for peer, known in self._peers.items()}
        check_reads(reads, specs, self._regions.targets)
        start = time.monotonic()
        moved: dict[int, PeerReport] = {}
        for read in reads:
            if read.runs:
                source = self._answer(Call.READ, read.peer, self._peers[read.peer].name, deadline, read.kind)
                count = copy_runs(read, source.source(read.kind), self._regions.targets[read.kind].region)
                before = moved[read.peer].bytes if read.peer in moved else 0
                moved[read.peer] = PeerReport(read.peer, before + count, time.monotonic() - start)
        peers = tuple(moved[peer] for peer in sorted(moved))
        return ReadReport(sum(each.bytes for each in peers), time.monotonic() - start, peers)

    def source(self, kind: str) -> Region:
        """The registered source region itself, for readers in this process."""
        return self._regions.sources[kind].region

    def close(self) -> None:
        if self._open:
            self._open = False
            self._network.detach(self.name)
            self._regions = Regions()

    def _answer(self, phase: Call, peer: int, name: str, deadline: float, kind: str | None = None) -> InMemoryTransport:
        try:
            endpoint = self._network.answer(name, deadline)
        except TimeoutError as error:
            raise TransportTimeout(phase, str(error), peer=peer, kind=kind) from None
        if endpoint is None:
            raise TransportError(phase, f"{name!r} is gone", peer=peer, kind=kind)
        return endpoint

    def _check_open(self, phase: Call) -> None:
        if not self._open:
            raise TransportError(phase, f"{self.name!r} is closed")
