"""Two-sided transport over torch.distributed (gloo): the source sends what a reader asks for through the store.

For stop-and-copy between nodes without RDMA, where one-sided reads would be emulated. A read needs the source's
progress thread, so nothing can stream over it. Readers and sources never wait for each other in a circle: a source
answers only requests whose receive is already posted.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from liver_core.device import DeviceWait, settle
from liver_core.device.region import AnyRegion
from liver_core.device.threads import background
from liver_core.transport.landing_blocks import LandingBlocks, spread
from liver_core.transport.protocol import Call, PeerReport, Read, ReadReport, TransportError, TransportTimeout
from liver_core.transport.regions import (
    Address,
    RegionBytes,
    Regions,
    Table,
    batches,
    check_reads,
    sliceable,
)

ROUND_BYTES_MAX = 4 << 20
ROUND_RUNS_MAX = 4096
ROUNDS_IN_FLIGHT = 4
"""Staging at a reader is at most twice ROUND_BYTES_MAX for each round in flight, 32 MiB, and two on their way to a
device; at a source 8 MiB."""

INBOX_BUSY_PERIOD_S, INBOX_IDLE_PERIOD_S = 0.001, 0.03
INBOX_BUSY_S = 1.0
"""So long after a request the next one is looked for often. Every look is a round trip to the store, which most
endpoints, read over a nearer transport, would make for nothing."""
SERVE_S_MAX = 10.0
LOST_REQUEST_S = 10.0
"""How long a source waits for the body of a request that was numbered but never written: its reader died between."""

TOKEN_BYTES = 16

PairMaker = Callable[[dist.Store, int, float], Any]
"""(store, rank 0 or 1, seconds) -> a backend with `send` and `recv`, such as ProcessGroupGloo, for two processes."""


def gloo_pair(store: dist.Store, rank: int, seconds: float) -> Any:
    """Two processes on gloo, on the interface that GLOO_SOCKET_IFNAME names or else the one of the host name."""
    gloo = dist.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]
    return gloo(store, rank, 2, timedelta(seconds=max(seconds, 0.001)))


@dataclass(frozen=True, slots=True)
class _Request:
    """What a reader posts to a source. `table` has a source offset and a length, in bytes, for every run."""

    pair: str
    tag: int
    kind: str
    seconds: float
    table: np.ndarray

    def encode(self) -> bytes:
        head = {"pair": self.pair, "tag": self.tag, "kind": self.kind, "seconds": self.seconds}
        return json.dumps(head).encode() + b"\n" + self.table.astype("<i8").tobytes()

    @staticmethod
    def decode(data: bytes) -> _Request:
        head, _, body = data.partition(b"\n")
        value = json.loads(head)
        table = np.frombuffer(body, dtype="<i8").reshape(-1, 2)
        return _Request(str(value["pair"]), int(value["tag"]), str(value["kind"]), float(value["seconds"]), table)


class _Inbox:
    """Numbered requests to one endpoint in the store. Readers post, the source takes; each is read once."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store = store
        self._prefix = f"liver/transport/{name}/inbox"
        self._seen = 0
        self._missing: dict[int, float] = {}

    def post(self, data: bytes) -> None:
        number = self._store.add(f"{self._prefix}/count", 1) - 1
        self._store.set(f"{self._prefix}/{number}", data)  # pyright: ignore[reportArgumentType]

    def take(self) -> Iterator[bytes]:
        now = time.monotonic()
        count = self._store.add(f"{self._prefix}/count", 0)
        self._missing |= dict.fromkeys(range(self._seen, count), now + LOST_REQUEST_S)
        self._seen = count
        for number, give_up in list(self._missing.items()):
            key = f"{self._prefix}/{number}"
            if self._store.check([key]):
                data = self._store.get(key)
                self._store.delete_key(key)
                del self._missing[number]
                yield data
            elif now > give_up:
                del self._missing[number]


@dataclass(slots=True)
class _GlooPeer:
    """A source this endpoint reads from; `pair` is None after a failure, until it is connected again."""

    address: Address
    pair_name: str
    pair: Any
    inbox: _Inbox
    tag: int = 0


@dataclass(slots=True)
class _Round:
    """One message from one peer: the runs of one batch, packed one after another."""

    peer: int
    kind: str
    table: Table
    staging: torch.Tensor | None = None
    work: Any = None


class TorchDistributedTransport:
    """One endpoint. `connect` opens a client connection to the store: one for its caller, one for the progress thread.

    Its operations must fail in time if the store stalls, since whoever ends the progress thread waits for them.
    """

    one_sided = False
    two_sided_because = "over gloo a source sends what is asked for"

    def __init__(
        self,
        name: str,
        connect: Callable[[], dist.Store],
        *,
        make_pair: PairMaker = gloo_pair,
        token: bytes | None = None,
    ) -> None:
        self.name = name
        self._connect = connect
        self._store: Any = connect()
        self._make_pair = make_pair
        self._token = (token or os.urandom(TOKEN_BYTES)).hex()
        self._regions = Regions()
        self._peers: dict[int, _GlooPeer] = {}
        self._blocks = LandingBlocks(2 * ROUND_BYTES_MAX)
        self._pairs_made = 0
        self._open = True
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

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
        return Address("torch", self.name, self._regions.source_specs(), {"token": self._token}).encode()

    def start_progress(self) -> None:
        self._check_open(Call.SERVE)
        if self._thread is None:
            self._stop.clear()
            server = _Server(self._connect(), self.name, self._regions, self._token, self._make_pair)
            self._thread = background(server.run, args=(self._stop,), name="transport-progress")
            self._thread.start()

    def calm(self) -> None:
        return

    def stop_progress(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        self._check_open(Call.CONNECT)
        decoded = Address.decode(address, "torch", peer)
        known = self._peers.get(peer)
        if known is not None and known.address != decoded:
            raise TransportError(Call.CONNECT, f"the number is taken by {known.address.name!r}", peer=peer)
        if known is not None and known.pair is not None:
            return
        self._pairs_made += 1
        pair_name = f"{self.name}>{decoded.name}#{self._pairs_made}"
        inbox = _Inbox(self._store, decoded.name)
        try:
            pair, token = self._introduce(pair_name, inbox, deadline)
        except Exception as error:
            raise _failure(Call.CONNECT, deadline, f"{decoded.name!r} did not answer: {error}", peer) from error
        if token != decoded.extra.get("token"):
            raise TransportError(Call.CONNECT, f"{decoded.name!r} is not who the address says", peer=peer)
        self._peers[peer] = _GlooPeer(decoded, pair_name, pair, inbox)

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        self._check_open(Call.READ)
        start = time.monotonic()
        known = {peer: each.address.regions for peer, each in self._peers.items()}
        tables = check_reads(reads, known, self._regions.targets)
        reports: dict[int, PeerReport] = {}
        waiting, flying = deque(_rounds(reads, tables)), deque[_Round]()
        failure: TransportError | None = None
        while flying or (waiting and not failure):
            try:
                while waiting and not failure and len(flying) < ROUNDS_IN_FLIGHT:
                    self._ask(waiting[0], deadline)
                    flying.append(waiting.popleft())
                if flying:
                    done = flying.popleft()
                    self._finish(done, deadline)
                    moved = int(done.table[:, 2].sum()) + (reports[done.peer].bytes if done.peer in reports else 0)
                    reports[done.peer] = PeerReport(done.peer, moved, time.monotonic() - start)
            except TransportError as error:
                failure = failure or error
        for device in {self._regions.targets[read.kind].region.device for read in reads}:
            settle(DeviceWait.LANDED, device)
        if failure:
            raise failure
        peers = tuple(reports[peer] for peer in sorted(reports))
        return ReadReport(sum(each.bytes for each in peers), time.monotonic() - start, peers)

    def close(self) -> None:
        self.stop_progress()
        self._open = False
        self._peers.clear()
        self._blocks.clear()
        self._regions = Regions()
        self._store = None  # Ends the connection, where nobody else holds it.

    def _introduce(self, pair_name: str, inbox: _Inbox, deadline: float) -> tuple[Any, str]:
        """Ask the source to open the pair, open this end, and receive the token over it."""
        seconds = _left(deadline)
        if seconds <= 0:
            raise TimeoutError("the deadline has passed")
        inbox.post(_Request(pair_name, 0, "", seconds, np.empty((0, 2))).encode())
        pair = self._make_pair(dist.PrefixStore(f"liver/transport/{pair_name}", self._store), 0, seconds)
        token = torch.zeros(TOKEN_BYTES, dtype=torch.uint8)
        pair.recv([token], 1, 0).wait(timedelta(seconds=max(_left(deadline), 0.001)))
        return pair, token.numpy().tobytes().hex()

    def _ask(self, each: _Round, deadline: float) -> None:
        """Post the receive, then ask for it: a source never waits for a reader that is not ready."""
        peer = self._peers[each.peer]
        if peer.pair is None:
            raise TransportError(Call.READ, "its connection was lost; connect again", peer=each.peer, kind=each.kind)
        if _left(deadline) <= 0:
            raise TransportTimeout(Call.READ, "deadline passed before it was asked", peer=each.peer, kind=each.kind)
        peer.tag += 1
        each.staging = self._blocks.take(self._regions.targets[each.kind].region.device)
        part = each.staging[: int(each.table[:, 2].sum())]
        try:
            each.work = peer.pair.recv([part], 1, peer.tag)
            request = _Request(peer.pair_name, peer.tag, each.kind, _left(deadline), each.table[:, [0, 2]])
            peer.inbox.post(request.encode())
        except Exception as error:
            peer.pair = None
            raise _failure(Call.READ, deadline, f"cannot ask {peer.address.name!r}: {error}", each.peer) from error

    def _finish(self, each: _Round, deadline: float) -> None:
        """Wait for the message and spread it over the target. Until then the target is untouched."""
        peer = self._peers[each.peer]
        assert each.staging is not None
        try:
            each.work.wait(timedelta(seconds=max(_left(deadline), 0.001)))
        except Exception as error:
            peer.pair = None  # gloo closes the connection on any error; its staging is dropped with it.
            text = f"{peer.address.name!r} did not send: {error}"
            raise _failure(Call.READ, deadline, text, each.peer, each.kind) from error
        target = self._regions.targets[each.kind].memory
        spread(each.staging, target, each.table)
        self._blocks.give_back(each.staging, target.device)

    def _check_open(self, phase: Call) -> None:
        if not self._open:
            raise TransportError(phase, f"{self.name!r} is closed")


class _Server:
    """The source's side: takes requests from the inbox, one after another, and sends. Lives in the progress thread."""

    def __init__(self, store: dist.Store, name: str, regions: Regions, token: str, make_pair: PairMaker) -> None:
        self._store = store
        self._inbox = _Inbox(store, name)
        self._regions = regions
        self._token = torch.frombuffer(bytearray.fromhex(token), dtype=torch.uint8)
        self._make_pair = make_pair
        self._pairs: dict[str, Any] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def run(self, stop: threading.Event) -> None:
        busy_until = 0.0
        while not stop.wait(INBOX_BUSY_PERIOD_S if time.monotonic() < busy_until else INBOX_IDLE_PERIOD_S):
            try:
                for data in self._inbox.take():
                    self._answer(data)
                    busy_until = time.monotonic() + INBOX_BUSY_S
            except (RuntimeError, dist.DistError):
                return  # The store is gone, and every reader learns it from the store too.

    def _answer(self, data: bytes) -> None:
        """A request that is malformed, out of bounds or whose reader is gone costs that reader its connection only."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            request = _Request.decode(data)
            try:
                if request.kind:
                    self._send(request)
                else:
                    self._open(request)
            except (RuntimeError, dist.DistError, ValueError, KeyError):
                self._pairs.pop(request.pair, None)

    def _open(self, request: _Request) -> None:
        seconds = min(request.seconds, SERVE_S_MAX)
        pair = self._make_pair(dist.PrefixStore(f"liver/transport/{request.pair}", self._store), 1, seconds)
        pair.send([self._token], 0, 0).wait(timedelta(seconds=seconds))
        self._pairs[request.pair] = pair

    def _send(self, request: _Request) -> None:
        source, lengths = self._regions.sources[request.kind].memory, request.table[:, 1]
        total = int(lengths.sum())
        if total > 2 * ROUND_BYTES_MAX:
            raise ValueError(f"{total} bytes in one request")
        if len(self._staging) < total:
            self._staging = torch.empty(2 * ROUND_BYTES_MAX, dtype=torch.uint8)
        part = self._staging[:total]
        _gather(source, part, request.table)
        work = self._pairs[request.pair].send([part], 0, request.tag)
        work.wait(timedelta(seconds=min(request.seconds, SERVE_S_MAX)))


def _rounds(reads: Sequence[Read], tables: Sequence[Table]) -> list[_Round]:
    """All rounds, one peer after another in turn, so that all sources send at once."""
    by_peer: dict[int, list[_Round]] = {}
    for read, table in zip(reads, tables, strict=True):
        for part in batches(table, ROUND_BYTES_MAX, ROUND_RUNS_MAX) if len(table) else ():
            by_peer.setdefault(read.peer, []).append(_Round(read.peer, read.kind, part))
    return [each for turn in zip_longest(*by_peer.values()) for each in turn if each is not None]


def _gather(source: RegionBytes, staging: torch.Tensor, table: np.ndarray) -> None:
    """Pack runs (offset, length) of a region one after another. Raises ValueError for runs that are not in it."""
    theirs, ours, at = *sliceable(source, staging), 0
    for piece, start, length in source.located(table):
        ours[at : at + length] = theirs[piece][start : start + length]
        at += length


def _left(deadline: float) -> float:
    return deadline - time.monotonic()


def _failure(phase: Call, deadline: float, text: str, peer: int, kind: str | None = None) -> TransportError:
    """Timeout or error, by the clock: gloo and the store raise the same exception for both."""
    made = TransportTimeout if _left(deadline) <= 0.005 else TransportError
    return made(phase, text.splitlines()[0][:300], peer=peer, kind=kind)
