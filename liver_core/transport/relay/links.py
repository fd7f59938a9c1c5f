"""Connections to one relay, and the answers that arrive over them: requests are sent ahead, bytes land in place.

One thread uses a `Links`; it sleeps in the kernel while nothing arrives.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from liver_core.device import is_host
from liver_core.transport.landing_blocks import LandingBlocks, spread
from liver_core.transport.protocol import Guard
from liver_core.transport.regions import RegionBytes, Table
from liver_core.transport.relay.messages import ANSWER_HEADER_BYTES, Answer, Request, Status, WireError

CHUNK_BYTES = 1 << 20
"""Of one request, which has less than twice as many."""
AHEAD_BYTES = 4 << 20
"""Asked for on each connection and not yet here: the product of 10 Gb/s and 3 ms."""
WAKE_BYTES = 256 << 10
VIEWS_MAX = 64
"""So many runs are received in place; the bytes of more are received as one and then spread."""


class LinkLost(Exception):
    """A connection ended, or what came over it was no answer. The text says why."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One request. `table`: int64 (runs, 3) of source offset, target offset and bytes. `read`: place of the read that
    it is a part of."""

    peer: int
    source: str
    kind: str
    table: Table
    target: RegionBytes
    guard: Guard | None = None
    read: int = 0
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = int(self.table[:, 2].sum())


class Link:
    """One connection. `on_chunk(chunk, answer, why)` is called when an answer and all its bytes are here; `why` is the
    relay's text where it has refused."""

    def __init__(self, connection: socket.socket, on_chunk: Callable[[Chunk, Answer, str], None]) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.asked: deque[Chunk] = deque()
        self.asked_bytes = 0
        self._on_chunk = on_chunk
        self._unsent = bytearray()
        self._number = self._expected = 0
        self._header = bytearray(ANSWER_HEADER_BYTES)
        self._answer: Answer | None = None
        self._blocks = LandingBlocks(2 * CHUNK_BYTES)
        self._block: torch.Tensor | None = None
        self._text = bytearray()
        self._least = 1
        self._views: deque[memoryview] = deque([memoryview(self._header)])

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def ask(self, chunk: Chunk) -> None:
        """Queue the request for a chunk."""
        self._unsent += Request(self._number, chunk.source, chunk.kind, chunk.table[:, [0, 2]], chunk.guard).encode()
        self._number += 1
        self.asked.append(chunk)
        self.asked_bytes += chunk.bytes

    def advance(self) -> None:
        """Send what the kernel takes and take what is here. Raises LinkLost."""
        self._send()
        self._receive()

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkLost(error.strerror or str(error)) from None

    def _receive(self) -> None:
        try:
            while self._views:
                got = self.connection.recvmsg_into(list(self._views)[:VIEWS_MAX])[0]
                if not got:
                    raise LinkLost("the relay has closed the connection")
                while got:
                    size = min(got, len(self._views[0]))
                    got -= size
                    if size == len(self._views[0]):
                        self._views.popleft()
                    else:
                        self._views[0] = self._views[0][size:]
                while not self._views:
                    self._whole()
        except BlockingIOError:
            self._sleep_until_much()
        except OSError as error:
            raise LinkLost(error.strerror or str(error)) from None
        except WireError as error:
            raise LinkLost(str(error)) from None

    def _whole(self) -> None:
        """A header, or the bytes that follow one, are here: say what comes next."""
        answer = self._answer
        if answer is None:
            answer = self._answer = Answer.decode(bytes(self._header))
            if not self.asked or answer.number != self._expected:
                raise WireError(f"an answer to request {answer.number}, expected {self._expected}")
            _check(answer, self.asked[0])
            if answer.bytes:
                self._views.extend(self._landing(self.asked[0], answer))
                return
        chunk = self.asked.popleft()
        self.asked_bytes -= chunk.bytes
        self._expected += 1
        if self._block is not None:
            spread(self._block, chunk.target, chunk.table)
            self._blocks.give_back(self._block, chunk.target.device)
        text, self._text = self._text.decode(errors="replace"), bytearray()
        self._answer = self._block = None
        self._views.append(memoryview(self._header))
        self._on_chunk(chunk, answer, text)

    def _sleep_until_much(self) -> None:
        """Have the kernel wake this thread for what is missing, or a good part of it: each look costs the training
        beside it."""
        least = min(WAKE_BYTES, sum(map(len, self._views)))
        if least != self._least:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def _landing(self, chunk: Chunk, answer: Answer) -> Iterable[memoryview]:
        if answer.status is Status.REFUSED:
            self._text = bytearray(answer.bytes)
            return [memoryview(self._text)]
        if self._in_place(chunk):
            views = [view.numpy().data for view in chunk.target.views]
            runs = chunk.target.located(chunk.table[:, 1:])
            return [views[piece][start : start + length] for piece, start, length in runs]
        self._block = self._blocks.take(chunk.target.device)
        return [self._block.numpy().data[: answer.bytes]]

    def _in_place(self, chunk: Chunk) -> bool:
        return len(chunk.table) <= VIEWS_MAX and is_host(chunk.target.device)


def _check(answer: Answer, chunk: Chunk) -> None:
    """Raises WireError for what is no answer to this request."""
    if answer.status is Status.WHOLE and answer.bytes != chunk.bytes:
        raise WireError(f"{answer.bytes} bytes for a request of {chunk.bytes}")
    if answer.status is Status.MOVED and chunk.guard is None:
        raise WireError("another version, for a request without a guard")
    if answer.status is Status.MOVED and answer.bytes:
        raise WireError(f"{answer.bytes} bytes of another version")


class Links:
    """All connections to one relay. `lost`: why there is none any more."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._done: list[tuple[Chunk, Answer, str]] = []
        self.links = [Link(each, lambda *done: self._done.append(done)) for each in connections]
        self.waiting: deque[Chunk] = deque()
        self.moved: set[tuple[int, Guard | None]] = set()
        """Peer and guard of what is not asked for any more: a guard that has failed will not hold again."""
        self.lost = ""

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(link.asked for link in self.links)

    @property
    def late(self) -> Chunk:
        """One that has not arrived, of links that are `busy`."""
        return next((link.asked[0] for link in self.links if link.asked), None) or self.waiting[0]

    def fill(self) -> None:
        """Queue requests for what waits, each on the connection that has least to bring."""
        while self.waiting:
            if (self.waiting[0].peer, self.waiting[0].guard) in self.moved:
                self.waiting.popleft()
                continue
            link = min(self.links, key=lambda each: each.asked_bytes)
            if link.asked and link.asked_bytes + self.waiting[0].bytes > AHEAD_BYTES:
                break
            link.ask(self.waiting.popleft())

    def taken(self) -> list[tuple[Chunk, Answer, str]]:
        """What has been answered since the last call."""
        done, self._done = self._done, []
        return done

    def close(self, why: str) -> None:
        """Nothing arrives over them any more."""
        self.lost = why
        for link in self.links:
            link.connection.close()


def advance(links: Iterable[Links], selector: selectors.BaseSelector, deadline: float) -> None:
    """Ask for what waits, and take what arrives until the deadline, at least once. `lost` where a connection is.

    `selector` keeps, from call to call, which connections are waited for.
    """
    wanted: dict[socket.socket, tuple[int, tuple[Links, Link]]] = {}
    for each in links:
        each.fill()
        for link in each.links:
            if link.asked:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent else 0)
                wanted[link.connection] = events, (each, link)
    if not wanted:  # All that waited was of a guard that has failed.
        return
    for key in tuple(selector.get_map().values()):
        if key.fileobj not in wanted:
            selector.unregister(key.fileobj)
    for connection, (events, data) in wanted.items():
        known = selector.get_map().get(connection)
        if known is None:
            selector.register(connection, events, data)
        elif known.events != events:
            selector.modify(connection, events, data)
    for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
        each, link = key.data
        try:
            if not each.lost:
                link.advance()
        except LinkLost as error:
            each.lost = str(error)
