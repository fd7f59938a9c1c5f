"""The relay itself: ranks of this machine register what may be read, and have it connect them to other relays. Readers
on other machines ask for bytes, which it reads out of the ranks' memory, on host and GPU, without their help.

A thread for each connection; each holds one answer in memory. A rank is forgotten when its connection ends, or its
process does. Only who holds the handoff's key is let in; only processes of the ranks' user may register or dial.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from liver_core import cuda_driver
from liver_core.transport.relay.device_memory import Gpus
from liver_core.transport.relay.memory import Block, Held, Place, ProcessMemory, ServedRank, UnreadableMemory
from liver_core.transport.relay.messages import (
    REQUEST_HEADER_BYTES,
    TEXT_BYTES_MAX,
    Answer,
    Request,
    Status,
    WireError,
)
from liver_core.transport.relay.sockets import (
    admit,
    dial,
    is_open,
    peer_process,
    receive,
    receive_local,
    send_all,
    send_local,
)

READERS_MAX = 1_024
STRANGERS_MAX = 256
"""Connections that have not proved yet that they hold the key."""
LOCALS_MAX = 512
ENDPOINTS_MAX, PIECES_MAX = 256, 1 << 20
HOST_CHARACTERS_MAX = 255
FIRST_WORD_S = 10.0
"""So long a process of this machine may be connected without a word."""
TOKEN_BYTES, TOKENS_MAX = 32, 8
DIAL_S_MAX = 30.0
UNUSED_S, LONELY_S = 900.0, 10.0
"""A relay ends when no rank has come within the first, and when none is connected any more for the second: its handoff
is over, or its ranks are."""
_LOOK_S, _LISTEN_AGAIN_S, _BUDGET_LOOK_S = 1.0, 0.1, 0.25
_BURST_S = 0.05
"""Of unused time that a budget makes up for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """`local`: name of the abstract unix socket for ranks. `host`, `ports`: where readers connect, the first free one.
    `keys`: of the handoff, the current first. `uids`: users of ranks. `stream_bytes_per_s`: most that it sends of what
    is guarded, which is read while the ranks train; None: all. `unused_s`, `lonely_s`: as UNUSED_S and LONELY_S.
    `listen_s`: so long it tries to get a port."""

    local: str
    host: str
    ports: tuple[int, int]
    keys: tuple[bytes, ...]
    uids: tuple[int, ...]
    stream_bytes_per_s: float | None = None
    unused_s: float = UNUSED_S
    lonely_s: float = LONELY_S
    listen_s: float = 0.0


@dataclass(slots=True)
class RelayCounts:
    """Since the relay began. `moved`: reads whose guard did not hold, of which no byte was sent."""

    bytes: int = 0
    reads: int = 0
    moved: int = 0
    refused: int = 0
    strangers: int = 0


class Budget:
    """A token bucket: `take` sleeps until so many bytes may be sent. For any thread."""

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size: int, still_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait for the right to send `size` bytes. False, with nothing taken, once nobody wants them any more."""
        if self._rate is None or not size:
            return True
        while True:
            with self._lock:
                now = self._clock()
                if now >= self._free_at:
                    self._free_at = max(self._free_at, now - _BURST_S) + size / self._rate
                    return True
                wait_s = min(self._free_at - now, _BUDGET_LOOK_S)
            self._sleep(wait_s)
            if not still_wanted():
                return False


class Relay:
    """See the module. `port` is known from the start; `serve` returns when the relay is over."""

    def __init__(self, config: RelayConfig, load_cuda: Callable[[], cuda_driver.CudaDriver] = cuda_driver.load) -> None:
        """Raises OSError where no port is free, or the local name is taken. `load_cuda`: called when a rank has named
        its GPU."""
        self.config = config
        self._gpus = Gpus(load_cuda)
        self.counts = RelayCounts()
        self._endpoints: dict[str, ServedRank] = {}
        self._lock = threading.Lock()
        self._budget = Budget(config.stream_bytes_per_s)
        self._ended = threading.Event()
        self._lonely_from = time.monotonic() + config.unused_s
        self._expects = True
        self._locals: dict[socket.socket, ProcessMemory | None] = {}
        self._readers: set[socket.socket] = set()
        self._strangers = threading.BoundedSemaphore(STRANGERS_MAX)
        self._tcp = listen(config.host, config.ports, time.monotonic() + config.listen_s)
        self.port: int = self._tcp.getsockname()[1]
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(f"\0{config.local}")
        self._unix.listen(LOCALS_MAX)

    def serve(self) -> None:
        """Until `end`, or until nobody has needed it for a while."""
        for name, listener, take in (("tcp", self._tcp, self._take_stranger), ("local", self._unix, self._take_local)):
            threading.Thread(target=self._accept, args=(listener, take), name=f"relay-{name}", daemon=True).start()
        while not self._ended.wait(_LOOK_S):
            with self._lock:
                lonely = not self._locals and (not self._expects or time.monotonic() > self._lonely_from)
                dead = [each for each, process in self._locals.items() if process is not None and not process.lives]
            for each in dead:  # What a rank has forked may have its connection still.
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            if lonely:
                self.end()
        for listener in (self._tcp, self._unix):
            # A thread in accept() keeps the listener: this wakes it.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def end(self) -> None:
        """Have `serve` return. For any thread, and for a signal handler."""
        self._ended.set()

    def expect_nobody(self) -> None:
        """No rank comes any more: end once none is connected. As `end`."""
        self._expects = False

    def _accept(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._ended.wait(0.05):  # Out of descriptors, perhaps.
                    return
                continue
            take(connection)

    # Readers.

    def _take_stranger(self, connection: socket.socket) -> None:
        with self._lock:
            full = len(self._readers) >= READERS_MAX
        if full or not self._strangers.acquire(blocking=False):
            connection.close()
        elif not _in_a_thread(self._serve_reader, connection):
            self._strangers.release()

    def _serve_reader(self, connection: socket.socket) -> None:
        with connection:
            try:
                admit(connection, self.config.keys)
            except (OSError, WireError):
                self.counts.strangers += 1
                return
            finally:
                self._strangers.release()
            with self._lock:
                self._readers.add(connection)
            try:
                self._answer_all(connection)
            except (OSError, WireError) as error:
                _log.info("a reader is gone: %s", error)
            finally:
                with self._lock:
                    self._readers.discard(connection)

    def _answer_all(self, connection: socket.socket) -> None:
        with Block() as block:
            while not self._ended.is_set():
                header = receive(connection, REQUEST_HEADER_BYTES)
                request = Request.decode(header, receive(connection, Request.body_bytes(header)))
                answer, text = self._answer(request, block)
                whole = answer.status is Status.WHOLE
                if (
                    whole
                    and request.guard is not None
                    and not self._budget.take(answer.bytes, lambda: is_open(connection) and not self._ended.is_set())
                ):
                    return
                send_all(connection, [answer.encode(), block.bytes[: answer.bytes] if whole else text])

    def _answer(self, request: Request, block: Block) -> tuple[Answer, bytes]:
        served, counts = self._endpoints.get(request.source), self.counts
        try:
            if served is None:
                raise UnreadableMemory(f"no endpoint {request.source[:64]!r} here: its rank has ended, or never was")
            held, value = served.read(request, block)
        except UnreadableMemory as error:
            text = str(error).encode()[:TEXT_BYTES_MAX]
            counts.refused += 1
            return Answer(request.number, Status.REFUSED, 0, len(text)), text
        counts.reads += 1
        if held:
            counts.bytes += request.bytes
            return Answer(request.number, Status.WHOLE, value, request.bytes), b""
        assert request.guard is not None
        counts.moved += 1
        return Answer(request.number, Status.MOVED, value, 0), b""

    # Ranks of this machine.

    def _take_local(self, connection: socket.socket) -> None:
        pid, user = peer_process(connection)
        process = None
        with contextlib.suppress(UnreadableMemory):  # Who has no number here can be connected, but not read.
            process = ProcessMemory(pid, user)
        with self._lock:
            refused = user.uid not in self.config.uids or len(self._locals) >= LOCALS_MAX
            if not refused:
                self._locals[connection] = process
        if refused:
            connection.close()
        elif not _in_a_thread(self._serve_local, connection, process):
            self._forget_local(connection, {})

    def _serve_local(self, connection: socket.socket, process: ProcessMemory | None) -> None:
        registered: dict[str, ServedRank] = {}
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(FIRST_WORD_S)
                try:
                    while True:
                        self._hear(connection, process, registered)
                except WireError as error:
                    send_local(connection, {"error": str(error)})
        finally:
            self._forget_local(connection, registered)

    def _forget_local(self, connection: socket.socket, registered: dict[str, ServedRank]) -> None:
        with self._lock:
            for name in registered:
                del self._endpoints[name]
            del self._locals[connection]
            self._lonely_from = time.monotonic() + self.config.lonely_s
        for served in registered.values():
            served.held.close()

    def _hear(
        self, connection: socket.socket, process: ProcessMemory | None, registered: dict[str, ServedRank]
    ) -> None:
        """One message, of which nothing stays behind."""
        message, descriptors = receive_local(connection)
        connection.settimeout(None)
        for each in descriptors:
            socket.close(each)
        try:
            match message:
                case {"register": str(name), "tokens": list(), "regions": dict(), "allocations": list()}:
                    if process is None:
                        raise UnreadableMemory("the relay sees other processes than this one")
                    tokens = self._register(name, process, message, registered)
                    send_local(connection, {"host": self.config.host, "port": self.port, "tokens": tokens})
                case {"dial": [str(host), int(port)], "seconds": int() | float() as seconds}:
                    if len(host) > HOST_CHARACTERS_MAX or not 0 < port < 1 << 16 or not seconds > 0:
                        raise WireError("a relay to dial has a host, a port and some seconds")
                    deadline = time.monotonic() + float(min(seconds, DIAL_S_MAX))
                    with dial(host, port, self.config.host, self.config.keys, deadline) as reader:
                        send_local(connection, {"dialled": True}, [reader.fileno()])
                case _:
                    raise WireError("a message registers or dials")
        except (OSError, UnicodeError, UnreadableMemory, WireError) as error:
            send_local(connection, {"error": str(error) or type(error).__name__})

    def _register(
        self, name: str, process: ProcessMemory, message: dict[str, Any], registered: dict[str, ServedRank]
    ) -> list[str]:
        """The bytes (hex) of the regions that hold the token, by which the rank sees that its memory is read."""
        held = Held()
        try:
            allocations = self._gpus.open(message["allocations"], held)
            places = {
                str(kind): allocations.place(pieces) if _on_device(pieces) else Place.of(process, pieces)
                for kind, pieces in message["regions"].items()
            }
            served = ServedRank(process, places, held)
            with Block() as block:
                tokens = [_token_in(served, str(kind), block) for kind in message["tokens"][:TOKENS_MAX]]
            with self._lock:
                if name in self._endpoints or len(self._endpoints) >= ENDPOINTS_MAX:
                    raise WireError(f"endpoint {name[:64]!r} is registered already, or {ENDPOINTS_MAX} are")
                if sum(each.pieces for each in (served, *self._endpoints.values())) > PIECES_MAX:
                    raise WireError(f"the regions of all endpoints have more than {PIECES_MAX} pieces")
                self._endpoints[name] = registered[name] = served
        except BaseException:
            held.close()
            raise
        return tokens


def _on_device(pieces: Any) -> bool:
    """Of a region; one that is none is refused by who takes it for the host's."""
    return isinstance(pieces, list) and bool(pieces) and isinstance(pieces[0], list) and len(pieces[0]) == 3


def _token_in(served: ServedRank, kind: str, block: Block) -> str:
    served.read(Request(0, "", kind, np.array([[0, TOKEN_BYTES]])), block)
    return block.bytes[:TOKEN_BYTES].tobytes().hex()


def _in_a_thread(serve: Callable[..., None], connection: socket.socket, *rest: ProcessMemory | None) -> bool:
    """Whether a thread could be started for it. Where none can, the connection is closed."""
    try:
        threading.Thread(target=serve, args=(connection, *rest), name="relay", daemon=True).start()
    except RuntimeError:
        connection.close()
        return False
    return True


def listen(host: str, ports: Sequence[int], deadline: float) -> socket.socket:
    """A listening socket on exactly this address, on the first free port from `ports[0]` to `ports[1]`; 0: any. Tries
    again until `deadline` (time.monotonic()). Raises OSError.
    """
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    while True:
        for port in range(ports[0], ports[1] + 1):
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
                listener.listen(READERS_MAX)
            except OSError as error:
                listener.close()
                if port == ports[1] and (error.errno != errno.EADDRINUSE or time.monotonic() >= deadline):
                    raise
            else:
                return listener
        time.sleep(_LISTEN_AGAIN_S)
