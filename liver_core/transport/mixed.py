"""Two transports as one: each peer is read over the near one where that is possible, else over the far one.

Near is NIXL (same machine, RDMA), far is torch.distributed, or a pair of both a relay and that one; which one serves a
peer is found out when it is connected.
An endpoint whose near half cannot be set up has the far one only, and says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from liver_core.device.region import AnyRegion
from liver_core.device.threads import background
from liver_core.transport.protocol import Call, Read, ReadReport, Transport, TransportError, TransportTimeout, Wire
from liver_core.transport.regions import Address, Regions, check_reads

RECONNECT_S = 5.0
_log = logging.getLogger(__name__)


class MixedTransport:
    """One endpoint of two. Both serve all sources; a peer is read over the first that could connect to it. `one_sided`
    is False from the start where the near half could not be set up."""

    def __init__(self, name: str, *, near: Transport, far: Transport) -> None:
        self.name = name
        self._near = near
        self._far = far
        self._regions = Regions()
        self._peers: dict[int, tuple[Address, Transport]] = {}
        self._refusals: dict[int, str] = {}
        """Why a peer is not read over the near half."""
        self._lost = ""
        """Why nothing can be read over the near half; empty while it can."""
        self._serves_near = True
        self._told: set[str] = set()
        """Why a peer is read over the far half, as far as it is in the log."""
        self._open = True

    @property
    def one_sided(self) -> bool:
        """Whether all peers connected so far are read one-sidedly, and further ones may be."""
        can_be = not self._lost or self._far.one_sided
        return can_be and all(via.one_sided for _, via in self._peers.values())

    def guards(self, peer: int) -> bool:
        return self._peers[peer][1].guards(peer)

    def wire(self, peer: int) -> Wire:
        wire, refusal = self._peers[peer][1].wire(peer), self._refusals.get(peer)
        return wire if refusal is None else Wire(wire.kind, (refusal, *wire.refused))

    def register(
        self,
        *,
        sources: Mapping[str, AnyRegion] | None = None,
        targets: Mapping[str, AnyRegion] | None = None,
    ) -> None:
        self._check_open(Call.REGISTER)
        fresh = self._regions.added(sources, targets)
        if not self._lost:
            try:
                self._near.register(sources=sources, targets=targets)
            except TransportError as error:
                self._lose_near(error)
        self._far.register(sources=sources, targets=targets)
        self._regions.add(*fresh)

    def address(self) -> bytes:
        self._check_open(Call.REGISTER)
        near = b""
        if not self._lost:
            try:
                near = self._near.address()
            except TransportError as error:
                self._lose_near(error)
        self._regions.published = True
        extra = {"near": near.decode(), "far": self._far.address().decode()}
        return Address("mixed", self.name, self._regions.source_specs(), extra).encode()

    def start_progress(self) -> None:
        self._check_open(Call.SERVE)
        if self._serves_near:
            # A rank that only reads begins with this, and so finds out here that the near half cannot be set up.
            try:
                self._near.start_progress()
            except TransportError as error:
                self._lose_near(error)
        self._far.start_progress()

    def calm(self) -> None:
        if self._serves_near:
            self._near.calm()
        self._far.calm()

    def stop_progress(self) -> None:
        self._near.stop_progress()
        self._far.stop_progress()

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        self._check_open(Call.CONNECT)
        decoded = Address.decode(address, "mixed", peer)
        if peer in self._peers and self._peers[peer][0] != decoded:
            raise TransportError(Call.CONNECT, f"the number is taken by {self._peers[peer][0].name!r}", peer=peer)
        near = str(decoded.extra.get("near")).encode()
        try:
            if self._lost:
                raise TransportError(Call.CONNECT, self._lost, peer=peer)
            self._near.connect(peer, near, deadline)
            self._peers[peer] = (decoded, self._near)
            self._refusals.pop(peer, None)
        except TransportTimeout:
            raise
        except TransportError as refusal:
            self._connect_far(peer, decoded, refusal, deadline)

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        self._check_open(Call.READ)
        start = time.monotonic()
        only = {self._peers[read.peer][1] for read in reads if read.peer in self._peers}
        if len(only) == 1 and all(read.peer in self._peers for read in reads):
            return only.pop().read(reads, deadline)
        known = {peer: address.regions for peer, (address, _) in self._peers.items()}
        check_reads(reads, known, self._regions.targets)
        if not reads:
            return ReadReport(0, 0.0, ())
        sides = (self._near, self._far)
        places = [[at for at, read in enumerate(reads) if self._peers[read.peer][1] is side] for side in sides]
        reports = self._both([reads[at] for at in places[0]], [reads[at] for at in places[1]], deadline)
        peers = tuple(sorted((each for report in reports for each in report.peers), key=lambda each: each.peer))
        guarded = {
            found[at]: outcome
            for found, report in zip(places, reports, strict=True)
            for at, outcome in report.guarded.items()
        }
        return ReadReport(sum(each.bytes for each in peers), time.monotonic() - start, peers, guarded)

    def close(self) -> None:
        self._open = False
        self._near.close()
        self._far.close()
        self._peers.clear()
        self._regions = Regions()

    def _lose_near(self, error: TransportError) -> None:
        """Peers that were to be read over the near half are read over the far one. They may read from here over it if
        they were given its address before. Raises TransportError if a peer cannot be reached over the far half."""
        deadline = time.monotonic() + RECONNECT_S
        self._told.add(error.text)
        for peer, (decoded, via) in self._peers.items():
            if via is self._near:
                self._connect_far(peer, decoded, error, deadline)
        self._lost, self._serves_near = error.text, self._regions.published
        _log.warning("one-sided reads are not possible here, reads take turns with training: %s", error.text)

    def _connect_far(self, peer: int, decoded: Address, refusal: TransportError, deadline: float) -> None:
        """`refusal`: why it is not read over the near half."""
        try:
            self._far.connect(peer, str(decoded.extra.get("far")).encode(), deadline)
        except TransportError as error:
            text = f"neither near ({refusal.text}) nor far ({error.text})"
            raise type(error)(Call.CONNECT, text, peer=peer) from error
        self._peers[peer] = (decoded, self._far)
        self._refusals[peer] = refusal.text
        if not self._far.one_sided and refusal.text not in self._told:
            self._told.add(refusal.text)
            _log.warning("rank %d is not read one-sidedly, reads take turns with training: %s", peer, refusal.text)

    def _both(self, near: list[Read], far: list[Read], deadline: float) -> list[ReadReport]:
        """Read over both at once: the reports of near and far. A failure of one is raised only when the other has ended
        too."""
        reports = [ReadReport(0, 0.0, ()), ReadReport(0, 0.0, ())]
        failures: list[TransportError] = []

        def run(at: int, side: Transport, reads: list[Read]) -> None:
            try:
                reports[at] = side.read(reads, deadline)
            except TransportError as error:
                failures.append(error)

        beside = background(run, args=(1, self._far, far), name="transport-far")
        beside.start()
        run(0, self._near, near)
        beside.join()
        if failures:
            raise failures[0]
        return reports

    def _check_open(self, phase: Call) -> None:
        if not self._open:
            raise TransportError(phase, f"{self.name!r} is closed")
