"""Reads over the relays of other machines: one-sided for the ranks that are read, plain TCP in between.

A source registers its regions with the relay of its own machine and does nothing more. A reader is connected by the
relay of its machine to that of the source's.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from liver_core import cuda_driver
from liver_core.device import DeviceWait, settle
from liver_core.device.region import AnyRegion, Region, as_region
from liver_core.transport.places import device_of, memory_of, piece_addresses
from liver_core.transport.protocol import (
    Call,
    GuardedRead,
    PeerReport,
    Read,
    ReadReport,
    TransportError,
    TransportTimeout,
)
from liver_core.transport.regions import Address, Regions, Registered, batches, check_reads
from liver_core.transport.relay.exports import Exports
from liver_core.transport.relay.links import CHUNK_BYTES, Chunk, Links, advance
from liver_core.transport.relay.local import DIAL_S, LocalRelay, NoRelay
from liver_core.transport.relay.messages import RUNS_MAX, Status
from liver_core.transport.relay.relay import TOKEN_BYTES

KIND = "relay"
CONNECTIONS = min(4, max(1, (os.cpu_count() or 1) // 4))
"""To each relay. Each keeps a core busy at either end: two on two cores brought 10 Gb/s a third less than one."""
_TOKENS = {"DRAM": "token", "VRAM": "token on the device"}
"""Kind of memory to the region that proves that it is read."""
UNREACHABLE_S = 10.0
"""So long a relay that did not answer is not dialled again."""
Where: TypeAlias = tuple[str, int]
"""Host and port of a relay."""


@dataclass(frozen=True, slots=True)
class _Peer:
    address: Address
    where: Where


class RelayTransport:
    """See the module and `Transport`. `local`: the relay of this machine, for this endpoint alone. `load_cuda`: called
    when a source lies on a GPU."""

    one_sided = True
    two_sided_because = ""

    def __init__(
        self,
        name: str,
        local: LocalRelay,
        load_cuda: Callable[[], cuda_driver.CudaDriver] = cuda_driver.load,
    ) -> None:
        self.name = name
        self._local = local
        self._regions = Regions()
        self._exports = Exports(load_cuda)
        self._pieces: dict[str, Sequence[tuple[int, ...]]] = {}
        self._token = torch.frombuffer(bytearray(os.urandom(TOKEN_BYTES)), dtype=torch.uint8)
        self._tokens: dict[str, torch.Tensor] = {}
        self._landing = torch.zeros(TOKEN_BYTES, dtype=torch.uint8)
        self._proof = Registered.of(as_region(self._landing))
        self._published = b""
        self._peers: dict[int, _Peer] = {}
        self._links: dict[Where, Links] = {}
        self._unreachable: dict[Where, tuple[float, str]] = {}
        self._selector = selectors.DefaultSelector()
        self._open = True

    def guards(self, peer: int) -> bool:
        return True

    def register(
        self,
        *,
        sources: Mapping[str, AnyRegion] | None = None,
        targets: Mapping[str, AnyRegion] | None = None,
    ) -> None:
        self._check_open(Call.REGISTER)
        fresh = self._regions.added(sources, targets)
        for kind, each in fresh[0].items():
            try:
                self._pieces[kind] = self._located(each.region)
                if _on_device(each.region):
                    self._place_token(each.region.device)
            except cuda_driver.CudaRefused as error:
                text = f"the stream relay cannot read this GPU's memory: {error}"
                raise TransportError(Call.REGISTER, text, kind=kind) from error
        self._regions.add(*fresh)

    def address(self) -> bytes:
        self._check_open(Call.REGISTER)
        if self._published:
            return self._published
        extra: dict[str, str | int | list[str]] = {}
        if self._regions.sources:
            token, kinds = self._token.numpy().tobytes(), [_TOKENS["DRAM"], *self._tokens]
            regions = {**self._pieces, _TOKENS["DRAM"]: self._located(as_region(self._token))}
            try:
                host, port = self._local.register(self.name, token, kinds, regions, self._exports.allocations)
            except NoRelay as error:
                raise TransportError(Call.REGISTER, str(error)) from error
            extra = {"host": host, "port": port, "token": token.hex(), "tokens": kinds}
        self._regions.published = True
        self._published = Address(KIND, self.name, self._regions.source_specs(), extra).encode()
        return self._published

    def start_progress(self) -> None:
        """The relay makes all progress there is."""
        self._check_open(Call.SERVE)

    def calm(self) -> None:
        """Nothing here is busy."""

    def stop_progress(self) -> None:
        """The relay serves until `close`."""

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        self._check_open(Call.CONNECT)
        decoded = Address.decode(address, KIND, peer)
        known = self._peers.get(peer)
        if known is not None and known.address != decoded:
            raise TransportError(Call.CONNECT, f"the number is taken by {known.address.name!r}", peer=peer)
        try:
            where = str(decoded.extra["host"]), int(decoded.extra["port"])
            token, kinds = bytes.fromhex(decoded.extra["token"]), [str(kind) for kind in decoded.extra["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(Call.CONNECT, f"not an address of a source: {error!r}", peer=peer) from None
        if not kinds:
            raise TransportError(Call.CONNECT, "not an address of a source: it has no token", peer=peer)
        if where not in self._links:
            self._links[where] = self._dial(peer, where, deadline)
        table = np.array([[0, 0, TOKEN_BYTES]])
        for kind in kinds:
            self._landing.zero_()
            chunk = Chunk(peer, decoded.name, kind, table, self._proof.memory)
            self._fetch({where: [chunk]}, deadline, Call.CONNECT)
            if self._landing.numpy().tobytes() != token:
                raise TransportError(Call.CONNECT, f"{decoded.name!r} is not who the address says", peer=peer)
        self._peers[peer] = _Peer(decoded, where)

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        self._check_open(Call.READ)
        start = time.monotonic()
        known = {peer: each.address.regions for peer, each in self._peers.items()}
        work: dict[Where, list[Chunk]] = {}
        wanted: dict[int, int] = {}
        for at, (read, table) in enumerate(zip(reads, check_reads(reads, known, self._regions.targets), strict=True)):
            peer, target = self._peers[read.peer], self._regions.targets[read.kind].memory
            for part in batches(table, CHUNK_BYTES, RUNS_MAX) if len(table) else ():
                chunk = Chunk(read.peer, peer.address.name, read.kind, part, target, read.guard, at)
                work.setdefault(peer.where, []).append(chunk)
            if read.guard is not None:
                wanted[at] = int(table[:, 2].sum())
        try:
            reports, arrived = self._fetch(work, deadline, Call.READ)
        finally:
            for device in {self._regions.targets[read.kind].region.device for read in reads}:
                settle(DeviceWait.LANDED, device)
        peers = tuple(replace(reports[peer], seconds=reports[peer].seconds - start) for peer in sorted(reports))
        guarded = {at: GuardedRead(arrived[at] == size, arrived[at]) for at, size in wanted.items()}
        return ReadReport(sum(each.bytes for each in peers), time.monotonic() - start, peers, guarded)

    def close(self) -> None:
        self._open = False
        for where in tuple(self._links):
            self._leave(where)
        self._selector.close()
        self._local.close()
        self._peers.clear()
        self._tokens.clear()
        self._regions = Regions()

    def _located(self, region: Region) -> Sequence[tuple[int, ...]]:
        """Of each piece: address and bytes, or as `Exports` says it. Raises CudaRefused."""
        sizes = (tensor.numel() * tensor.element_size() for tensor in region.tensors)
        pieces = list(zip(piece_addresses(region), sizes, strict=True))
        return self._exports.located(device_of(region), pieces) if _on_device(region) else pieces

    def _place_token(self, device: torch.device) -> None:
        """Where relay and peers prove that they read the memory of this device. Raises CudaRefused."""
        kind = _TOKENS["VRAM"]
        if kind not in self._tokens:
            self._tokens[kind] = self._token.to(device, copy=True)
            settle(DeviceWait.LANDED, device)
            self._pieces[kind] = self._located(as_region(self._tokens[kind]))

    def _dial(self, peer: int, where: Where, deadline: float) -> Links:
        """Connections to the relay of a machine, which its ranks share: where it did not answer for one of them, the
        others do not wait for it again. Raises TransportError."""
        until, text = self._unreachable.get(where, (0.0, ""))
        if time.monotonic() < until:
            raise TransportError(Call.CONNECT, text, peer=peer)
        connections: list[socket.socket] = []
        try:
            for _ in range(CONNECTIONS):
                seconds = min(DIAL_S, deadline - time.monotonic())
                if seconds <= 0:
                    raise TransportTimeout(Call.CONNECT, "the deadline has passed", peer=peer)
                connections.append(self._local.dial(*where, seconds))
        except (NoRelay, TransportTimeout) as error:
            for each in connections:
                each.close()
            if isinstance(error, TransportTimeout):
                raise
            text = f"the stream relay at {where[0]} port {where[1]} cannot be reached: {error}"
            self._unreachable[where] = time.monotonic() + UNREACHABLE_S, text
            raise TransportError(Call.CONNECT, text, peer=peer) from error
        return Links(connections)

    def _fetch(
        self, work: Mapping[Where, list[Chunk]], deadline: float, phase: Call
    ) -> tuple[dict[int, PeerReport], Counter[int]]:
        """Have all chunks arrive, save those whose guard does not hold. `seconds` of a report are the time (monotonic)
        of its last byte; the counter has the bytes of each read.

        After a failure nothing new is asked for, but what flies is waited for.
        """
        for where, chunks in work.items():
            if where not in self._links:
                raise TransportError(phase, "its connection was lost; connect again", peer=chunks[0].peer)
            self._links[where].waiting.extend(chunks)
            self._links[where].moved.clear()
        reports: dict[int, PeerReport] = {}
        arrived: Counter[int] = Counter()
        failure: TransportError | None = None
        while busy := {where: self._links[where] for where in work if where in self._links and self._links[where].busy}:
            if time.monotonic() >= deadline:
                late = next(iter(busy.values())).late
                for where in busy:
                    self._leave(where)
                text = f"deadline passed, still waiting for {late.source!r}"
                raise failure or TransportTimeout(phase, text, peer=late.peer, kind=_kind(phase, late))
            advance(busy.values(), self._selector, deadline)
            for where, links in busy.items():
                failure = self._taken(links, reports, arrived, phase) or failure
                if links.lost:
                    if links.busy:  # Its last answer and its end may come together.
                        late = links.late
                        text = f"the connection to {late.source!r} was lost: {links.lost}"
                        failure = failure or TransportError(phase, text, peer=late.peer, kind=_kind(phase, late))
                    self._leave(where)
            if failure:
                for links in busy.values():
                    links.waiting.clear()
        if failure:
            raise failure
        return reports, arrived

    def _taken(
        self, links: Links, reports: dict[int, PeerReport], arrived: Counter[int], phase: Call
    ) -> TransportError | None:
        """Count what has arrived; the first refusal."""
        failure = None
        for chunk, answer, why in links.taken():
            if answer.status is Status.REFUSED:
                text = why or "the relay refused it and did not say why"
                failure = failure or TransportError(phase, text, peer=chunk.peer, kind=_kind(phase, chunk))
            elif answer.status is Status.MOVED:
                links.moved.add((chunk.peer, chunk.guard))
            else:
                arrived[chunk.read] += answer.bytes
                moved = answer.bytes + (reports[chunk.peer].bytes if chunk.peer in reports else 0)
                reports[chunk.peer] = PeerReport(chunk.peer, moved, time.monotonic())
        return failure

    def _leave(self, where: Where) -> None:
        self._links.pop(where).close("left")

    def _check_open(self, phase: Call) -> None:
        if not self._open:
            raise TransportError(phase, f"{self.name!r} is closed")


def _on_device(region: Region) -> bool:
    return bool(region.numel) and memory_of(region) == "VRAM"


def _kind(phase: Call, chunk: Chunk) -> str | None:
    """A proof is of no kind that the caller knows."""
    return None if phase is Call.CONNECT else chunk.kind
