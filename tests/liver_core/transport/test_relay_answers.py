"""What a reader makes of a relay that holds the key and answers wrong, breaks off or dies: the bytes that it asked for,
or a failure of the transport with its reason; never another error, since a rank that trains reads."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from liver_core.reshard import CopyRuns
from liver_core.transport.protocol import Guard, GuardedRead, Read, TransportError
from liver_core.transport.regions import Address, Regions
from liver_core.transport.relay.links import AHEAD_BYTES, CHUNK_BYTES
from liver_core.transport.relay.local import NoRelay
from liver_core.transport.relay.messages import (
    BYTES_MAX,
    REQUEST_HEADER_BYTES,
    Answer,
    Request,
    Status,
    WireError,
    handoff_key,
)
from liver_core.transport.relay.sockets import admit, dial, receive
from liver_core.transport.relay.transport import RelayTransport

KEY, TOKEN = handoff_key("secret", "handoff"), bytes(range(32))
ELEMENTS, GUARD = 4_096, Guard("counter", 0, 8)
RUNS = {"one run": (CopyRuns(0, 0, ELEMENTS),), "many": tuple(CopyRuns(4 * at, 4 * at, 2) for at in range(1_000))}
Behave = Callable[[socket.socket, Request], None]


def _answer(status: Status, size: int, follows: int, *, number: int = 0) -> Behave:
    def answer(connection: socket.socket, request: Request) -> None:
        told = Answer(request.number + number, status, 8, request.bytes if size < 0 else size)
        connection.sendall(told.encode() + b"\x11" * (request.bytes if follows < 0 else follows))

    return answer


WHOLE = _answer(Status.WHOLE, -1, -1)


def _whole_and_the_end(connection: socket.socket, request: Request) -> None:
    """The last bytes and the end come together, as from a relay that is killed right after."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    WHOLE(connection, request)
    connection.shutdown(socket.SHUT_RDWR)


def _whole_and_more(connection: socket.socket, request: Request) -> None:
    told = Answer(request.number, Status.WHOLE, 8, request.bytes).encode() + b"\x11" * request.bytes
    connection.sendall(told + Answer(request.number + 1, Status.MOVED, 0, 0).encode())


def _half_and_the_end(connection: socket.socket, request: Request) -> None:
    _answer(Status.WHOLE, -1, request.bytes // 2)(connection, request)
    connection.shutdown(socket.SHUT_RDWR)


ANSWERED: dict[str, Behave] = {"whole": WHOLE, "and the end": _whole_and_the_end, "and more": _whole_and_more}
REFUSED: dict[str, tuple[Behave, str]] = {
    "half": (_half_and_the_end, "was lost: the relay has closed the connection"),
    "short": (_answer(Status.WHOLE, 7, 7), "7 bytes for a request of"),
    "another number": (_answer(Status.WHOLE, -1, -1, number=7), "expected"),
    "no bytes that moved": (_answer(Status.MOVED, 0, 0), "without a guard"),
    "bytes that moved": (_answer(Status.MOVED, BYTES_MAX, BYTES_MAX), "another version"),
    "refused without a word": (_answer(Status.REFUSED, 0, 0), "did not say why"),
    "noise": (lambda connection, _: connection.sendall(b"\xb1" * 5_000), "an answer of status 177"),
    "nothing": (lambda connection, _: None, "deadline passed"),
}


class OddRelay:
    """Listens as a relay, gives the token, and behaves as told for all else. Ranks reach it without their own."""

    def __init__(self, behave: Behave) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._behave = behave
        self.dialled = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def dial(self, host: str, port: int, seconds: float) -> socket.socket:
        self.dialled += 1
        if port != self.port:
            raise NoRelay("timed out")
        return dial(host, port, "127.0.0.1", [KEY], time.monotonic() + seconds)

    def close(self) -> None:
        """For the endpoint and for the listener."""
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError, WireError), self._listener.accept()[0] as connection:
            admit(connection, [KEY])
            while True:
                header = receive(connection, REQUEST_HEADER_BYTES)
                request = Request.decode(header, receive(connection, Request.body_bytes(header)))
                if request.kind == "token":
                    connection.sendall(Answer(request.number, Status.WHOLE, 0, len(TOKEN)).encode() + TOKEN)
                else:
                    self._behave(connection, request)


def address(name: str, port: int, elements: int = ELEMENTS) -> bytes:
    """Of a source behind the relay at this port."""
    sources, regions = {"state": torch.zeros(elements), "counter": torch.zeros(1, dtype=torch.int64)}, Regions()
    regions.add(*regions.added(sources, None))
    extra = {"host": "127.0.0.1", "port": port, "token": TOKEN.hex(), "tokens": ["token"]}
    return Address("relay", name, regions.source_specs(), extra).encode()


@contextlib.contextmanager
def reading(behave: Behave, elements: int = ELEMENTS) -> Iterator[tuple[RelayTransport, torch.Tensor]]:
    """A reader that is connected to such a relay, and where its bytes land."""
    relay, state = OddRelay(behave), torch.full((elements,), -1.0)
    reader = RelayTransport("reader", relay)  # pyright: ignore[reportArgumentType]
    with contextlib.closing(relay), contextlib.closing(reader):
        reader.register(targets={"state": state})
        reader.connect(0, address("source", relay.port, elements), time.monotonic() + 5)
        yield reader, state


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("guard", [None, GUARD], ids=["pause", "guarded"])
@pytest.mark.parametrize("behave", ANSWERED)
def test_what_was_asked_for_and_came_whole_counts_whatever_comes_then(behave: str, guard: Guard | None, runs: str):
    with reading(ANSWERED[behave]) as (reader, state):
        report = reader.read([Read(0, "state", RUNS[runs], guard)], time.monotonic() + 5)
        assert report.bytes == 4 * sum(run.length for run in RUNS[runs]) == 4 * int((state != -1).sum())
        if behave != "whole":
            with pytest.raises(TransportError):
                reader.read([Read(0, "state", RUNS[runs], guard)], time.monotonic() + 1)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("behave", REFUSED)
def test_anything_else_is_a_failure_of_the_transport_that_says_why(behave: str, runs: str):
    act, why = REFUSED[behave]
    with reading(act) as (reader, _), pytest.raises(TransportError, match=why):
        reader.read([Read(0, "state", RUNS[runs])], time.monotonic() + 1)


def test_a_relay_that_did_not_answer_for_one_rank_is_not_waited_for_again_by_the_next():
    with reading(WHOLE) as (reader, _):
        relay = reader._local
        assert isinstance(relay, OddRelay) and relay.dialled == 1
        for peer in (1, 2, 3):
            with pytest.raises(TransportError, match="port 9 cannot be reached: timed out"):
                reader.connect(peer, address(f"rank {peer}", 9), time.monotonic() + 5)
        assert relay.dialled == 2


def test_a_guard_that_fails_ends_the_read_at_once_however_much_was_still_to_be_asked_for():
    asked = []

    def moved(connection: socket.socket, request: Request) -> None:
        asked.append(request)
        if len(asked) * CHUNK_BYTES == AHEAD_BYTES:  # All that were sent ahead are answered together.
            answers = [Answer(each.number, Status.MOVED, 10, 0).encode() for each in asked]
            connection.sendall(b"".join(answers))

    with reading(moved, AHEAD_BYTES) as (reader, state):
        began = time.monotonic()
        report = reader.read([Read(0, "state", (CopyRuns(0, 0, len(state)),), GUARD)], began + 5)
        assert time.monotonic() - began < 2 and report.guarded[0] == GuardedRead(False, 0)
        assert len(asked) * CHUNK_BYTES == AHEAD_BYTES
