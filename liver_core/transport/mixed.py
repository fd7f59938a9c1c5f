"""Several transports as one: each peer is read over the first of them that reaches it, found out when it is connected.

The ways have names, and an address has one part for each way of its endpoint: endpoints need not have the same ways.
A way that cannot be set up here is given up, with the reason in the log. The last way has to work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from liver_core.device.region import AnyRegion
from liver_core.device.threads import background
from liver_core.transport.protocol import (
    Call,
    Read,
    ReadReport,
    Transport,
    TransportError,
    TransportTimeout,
    WayLost,
)
from liver_core.transport.regions import Address, Regions, check_reads

RECONNECT_S = 5.0
WHY_CHARACTERS_MAX = 500
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Wire:
    """How a peer is read. `refused`: why no earlier way is taken, each with its name, in their order."""

    way: str
    refused: tuple[str, ...] = ()


class MixedTransport:
    """One endpoint of several. All serve all sources; a peer is read over the first that could connect to it."""

    def __init__(self, name: str, ways: Mapping[str, Transport]) -> None:
        """`ways`: by name, in the order in which they are tried."""
        self.name = name
        self._ways = dict(ways)
        self._last = list(ways)[-1]
        self._regions = Regions()
        self._peers: dict[int, tuple[Address, str]] = {}
        self._refusals: dict[int, tuple[str, ...]] = {}
        self._lost: dict[str, str] = {}
        """Why nothing can be read over a way."""
        self._serving = set(ways)
        self._told: set[str] = set()
        """Why peers are not read over a way, as far as it is in the log."""
        self._open = True

    @property
    def one_sided(self) -> bool:
        """Whether all peers connected so far are read one-sidedly, and further ones may be."""
        can_be = any(transport.one_sided for way, transport in self._ways.items() if way not in self._lost)
        return can_be and all(self._ways[way].one_sided for _, way in self._peers.values())

    @property
    def two_sided_because(self) -> str:
        """Of the first peer that is not read one-sidedly: what refused each better way."""
        for peer, (address, way) in sorted(self._peers.items()):
            if not self._ways[way].one_sided:
                why = "; ".join(self._refusals[peer]) or self._ways[way].two_sided_because
                return f"{address.name} is read over {way}: {why}"
        return "; ".join(f"{way}: {text}" for way, text in self._lost.items())

    def guards(self, peer: int) -> bool:
        return self._ways[self._peers[peer][1]].guards(peer)

    def wire(self, peer: int) -> Wire:
        """How this peer, which is connected, is read."""
        return Wire(self._peers[peer][1], self._refusals[peer])

    def register(
        self,
        *,
        sources: Mapping[str, AnyRegion] | None = None,
        targets: Mapping[str, AnyRegion] | None = None,
    ) -> None:
        self._check_open(Call.REGISTER)
        fresh = self._regions.added(sources, targets)
        for way, transport in self._ways.items():
            if way not in self._lost:
                self._set_up(way, partial(transport.register, sources=sources, targets=targets))
        self._regions.add(*fresh)

    def address(self) -> bytes:
        self._check_open(Call.REGISTER)
        parts: dict[str, str] = {}
        for way, transport in self._ways.items():
            part = None if way in self._lost else self._set_up(way, transport.address)
            if part is not None:
                parts[way] = part.decode()
        self._regions.published = True
        missing = {way: text[:WHY_CHARACTERS_MAX] for way, text in self._lost.items()}
        extra = {"ways": parts, "missing": missing}
        return Address("mixed", self.name, self._regions.source_specs(), extra).encode()

    def start_progress(self) -> None:
        self._check_open(Call.SERVE)
        for way, transport in self._ways.items():
            # A rank that only reads begins with this, and so finds out here that a way cannot be set up.
            if way in self._serving:
                self._set_up(way, transport.start_progress)

    def calm(self) -> None:
        for way, transport in self._ways.items():
            if way in self._serving:
                transport.calm()

    def stop_progress(self) -> None:
        for transport in self._ways.values():
            transport.stop_progress()

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        self._check_open(Call.CONNECT)
        decoded = Address.decode(address, "mixed", peer)
        if peer in self._peers and self._peers[peer][0] != decoded:
            raise TransportError(Call.CONNECT, f"the number is taken by {self._peers[peer][0].name!r}", peer=peer)
        if not isinstance(decoded.extra.get("ways"), dict):
            raise TransportError(Call.CONNECT, "not an address: it names no ways", peer=peer)
        self._connect(peer, decoded, deadline)

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        self._check_open(Call.READ)
        start = time.monotonic()
        ways = {self._peers[read.peer][1] for read in reads if read.peer in self._peers}
        if len(ways) == 1 and all(read.peer in self._peers for read in reads):
            return self._ways[ways.pop()].read(reads, deadline)
        known = {peer: address.regions for peer, (address, _) in self._peers.items()}
        check_reads(reads, known, self._regions.targets)
        if not reads:
            return ReadReport(0, 0.0, ())
        places = {way: [at for at, read in enumerate(reads) if self._peers[read.peer][1] == way] for way in ways}
        reports = self._at_once({way: [reads[at] for at in found] for way, found in places.items()}, deadline)
        peers = tuple(
            sorted((each for report in reports.values() for each in report.peers), key=lambda each: each.peer)
        )
        guarded = {
            places[way][at]: outcome for way, report in reports.items() for at, outcome in report.guarded.items()
        }
        return ReadReport(sum(each.bytes for each in peers), time.monotonic() - start, peers, guarded)

    def close(self) -> None:
        self._open = False
        for transport in self._ways.values():
            transport.close()
        self._peers.clear()
        self._regions = Regions()

    def _set_up(self, way: str, step: Callable[[], _Result]) -> _Result | None:
        """Do this step of a way. One that cannot be set up is given up, unless it is the last."""
        try:
            return step()
        except TransportError as error:
            if way == self._last:
                raise
            if failures := self._lose(way, error):
                raise failures[0] from error
            return None

    def _lose(self, way: str, error: TransportError) -> list[TransportError]:
        """Peers that were to be read over this way are read over a later one. They may read from here over it if they
        were given its address before. Why a peer cannot be reached over any other: it is connected no more."""
        deadline = time.monotonic() + RECONNECT_S
        self._lost[way] = error.text
        if not self._regions.published:
            self._serving.discard(way)
        self._told.add(_refusal(way, error))
        _log.warning("reads over %s are not possible here: %s", way, error.text)
        failures: list[TransportError] = []
        for peer, (decoded, via) in list(self._peers.items()):
            if via == way:
                del self._peers[peer]
                try:
                    self._connect(peer, decoded, deadline)
                except TransportError as failure:
                    failures.append(failure)
        return failures

    def _connect(self, peer: int, decoded: Address, deadline: float) -> None:
        refusals: list[str] = []
        for way, transport in self._ways.items():
            try:
                if way in self._lost:
                    raise TransportError(Call.CONNECT, self._lost[way], peer=peer)
                if way not in decoded.extra["ways"]:
                    why = dict(decoded.extra.get("missing") or {}).get(way, "it has no such way")
                    raise TransportError(Call.CONNECT, f"{decoded.name!r} cannot be read over it: {why}", peer=peer)
                transport.connect(peer, str(decoded.extra["ways"][way]).encode(), deadline)
            except TransportError as error:
                refusals.append(_refusal(way, error))
                if way == self._last:
                    text = f"no way reaches {decoded.name!r}: {'; '.join(refusals)}"
                    raise type(error)(Call.CONNECT, text, peer=peer) from error
                if isinstance(error, TransportTimeout):
                    raise
                if isinstance(error, WayLost):
                    self._lose(way, error)
                continue
            self._peers[peer], self._refusals[peer] = (decoded, way), tuple(refusals)
            if not transport.one_sided:
                self._tell(peer, [refusal for refusal in refusals if refusal not in self._told])
            return

    def _tell(self, peer: int, refusals: list[str]) -> None:
        if refusals:
            self._told.update(refusals)
            text = "; ".join(refusals)
            _log.warning("rank %d is not read one-sidedly, reads take turns with training: %s", peer, text)

    def _at_once(self, work: Mapping[str, Sequence[Read]], deadline: float) -> dict[str, ReadReport]:
        """Read over several ways at the same time. A failure of one is raised only when the others have ended too."""
        reports: dict[str, ReadReport] = {}
        failures: list[TransportError] = []

        def run(way: str) -> None:
            try:
                reports[way] = self._ways[way].read(work[way], deadline)
            except TransportError as error:
                failures.append(error)

        first, *others = (way for way in self._ways if way in work)
        threads = [background(run, args=(way,), name=f"transport-{way}") for way in others]
        for thread in threads:
            thread.start()
        run(first)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return reports

    def _check_open(self, phase: Call) -> None:
        if not self._open:
            raise TransportError(phase, f"{self.name!r} is closed")


def _refusal(way: str, error: TransportError) -> str:
    return f"{way}: {error.text}"
