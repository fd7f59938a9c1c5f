"""A stream relay by itself: what it lets in, what it gives, and what no request gets out of it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from liver_core.transport.protocol import Guard
from liver_core.transport.relay.local import LocalRelay
from liver_core.transport.relay.memory import Block, Place, ProcessMemory, ServedRank, UnreadableMemory
from liver_core.transport.relay.messages import (
    ANSWER_HEADER_BYTES,
    BYTES_MAX,
    REQUEST_HEADER_BYTES,
    Answer,
    Request,
    Status,
    WireError,
    handoff_key,
)
from liver_core.transport.relay.relay import TOKEN_BYTES, Budget
from liver_core.transport.relay.sockets import dial, receive
from tests.liver_core.transport.relays import MYSELF, RelayProcess
from tests.tiers import sample

KEY = handoff_key("secret", "handoff")
INSIDE, OUTSIDE = 0x5A, 0xC3
REGION_BYTES, MARGIN_BYTES = 64_000, 8_192
COUNTS = {"a few": 500, "many": 50_000}
REQUESTS = sample(COUNTS, "a few")
GROWTH_BYTES_MAX = 64 << 20


class Fortress:
    """Memory of this process: a region of INSIDE between margins of OUTSIDE, and a counter that is 8."""

    def __init__(self) -> None:
        self.memory = np.full(MARGIN_BYTES + REGION_BYTES + MARGIN_BYTES, OUTSIDE, dtype=np.uint8)
        self.memory[MARGIN_BYTES : MARGIN_BYTES + REGION_BYTES] = INSIDE
        self.counter = np.array([8], dtype=np.int64)
        at = self.memory.ctypes.data + MARGIN_BYTES
        first = REGION_BYTES // 3
        self.places = {
            "state": [(at, first), (at + first, REGION_BYTES - first)],
            "flat": [(at, REGION_BYTES)],
            "counter": [(self.counter.ctypes.data, 8)],
        }

    def served(self) -> ServedRank:
        process = ProcessMemory(os.getpid(), MYSELF)
        return ServedRank(process, {kind: Place.of(process, pieces) for kind, pieces in self.places.items()})

    @contextlib.contextmanager
    def register(self, relay: RelayProcess) -> Iterator[None]:
        """With this process as a rank."""
        token = np.frombuffer(os.urandom(TOKEN_BYTES), dtype=np.uint8).copy()
        places = {**self.places, "token": [(token.ctypes.data, TOKEN_BYTES)]}
        with contextlib.closing(LocalRelay(relay.local)) as local:
            local.register("rank", token.tobytes(), ["token"], places)
            yield


def hostile(draw: random.Random, source: str) -> tuple[bytes, bytes]:
    """Header and body of a request that is near to a good one, or far from one."""
    if draw.random() < 0.1:
        return draw.randbytes(REQUEST_HEADER_BYTES), draw.randbytes(draw.randrange(200))
    far = (0, 1, 7, 8, REGION_BYTES - 1, REGION_BYTES, REGION_BYTES + 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63))
    is_near = draw.random() < 0.5
    runs = draw.choice((1, 2, 5) if is_near else (0, 1, 2, 1_500))
    lengths = (*range(1, 99), *(() if is_near else far))
    offsets = (draw.randrange(REGION_BYTES - 99), *(() if is_near else far))
    table = [[draw.choice(offsets), draw.choice(lengths)] for _ in range(runs)]
    kind = draw.choice(("state", "flat", "counter") if is_near else ("state", "nothing", "", "x" * 600))
    value, index = draw.choice((8, 9)), 0 if is_near else draw.choice((1, -1, 2**40))
    guard = draw.choice((None, Guard("counter", index, value), Guard("no", 0, 8)))
    request = Request(draw.randrange(9), draw.choice((source, source, "nobody")), kind, _table(table), guard)
    whole = bytearray(request.encode())
    for _ in range(draw.choice((0, 0, 0, 1, 3))):
        whole[draw.randrange(len(whole))] = draw.randrange(256)
    return bytes(whole[:REQUEST_HEADER_BYTES]), bytes(whole[REQUEST_HEADER_BYTES:])


def _table(runs: list[list[int]]) -> np.ndarray:
    return np.array(runs, dtype=np.int64).reshape(len(runs), 2)


def test_no_request_reads_a_byte_outside_the_regions_or_raises_what_is_not_expected():
    draw, fortress = random.Random(1), Fortress()
    served, block = fortress.served(), Block()
    outcomes = {"refused by its form": 0, "refused by its place": 0, "given": 0, "moved": 0}
    for _ in range(5_000):
        header, body = hostile(draw, "rank")
        try:
            if Request.body_bytes(header) != len(body):
                raise WireError("another length")
            request = Request.decode(header, body)
            held, _ = served.read(request, block)
        except WireError:
            outcomes["refused by its form"] += 1
        except UnreadableMemory:
            outcomes["refused by its place"] += 1
        else:
            outcomes["given" if held else "moved"] += 1
            if held and request.kind != "counter":
                assert (block.bytes[: request.bytes] == INSIDE).all()
    assert min(outcomes.values()) > 100, outcomes
    assert len(served.counters) <= 2


@pytest.fixture
def served_here() -> Iterator[tuple[RelayProcess, str, Fortress]]:
    """A relay with which this process is registered as a rank."""
    fortress = Fortress()
    with RelayProcess() as relay, fortress.register(relay):
        yield relay, "rank", fortress


def ask(reader: socket.socket, request: Request) -> tuple[Answer, bytes]:
    reader.sendall(request.encode())
    answer = Answer.decode(receive(reader, ANSWER_HEADER_BYTES))
    return answer, receive(reader, answer.bytes)


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", REQUESTS)
def test_hostile_readers_get_nothing_and_cost_no_memory(
    served_here: tuple[RelayProcess, str, Fortress], count: str, request: pytest.FixtureRequest
):
    """Readers that hold the key, and strangers between them. One that asks well is served all along."""
    relay, source, _ = served_here
    draw, process = random.Random(2), psutil.Process(relay.process.pid)
    good = dial("127.0.0.1", relay.port, "127.0.0.1", [KEY], time.monotonic() + 10)
    well = Request(1, source, "state", np.array([[0, REGION_BYTES // 3]]), Guard("counter", 0, 8))
    assert ask(good, well)[0].status is Status.WHOLE
    before, reader, closed = process.memory_info().rss, None, 0
    for number in range(COUNTS[count]):
        if number % 100 == 0:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", relay.port), 5) as stranger:
                stranger.sendall(draw.randbytes(draw.choice((1, 60, 500))))
            answer, data = ask(good, well)
            assert answer.status is Status.WHOLE and set(data) == {INSIDE}
        try:
            reader = reader or dial("127.0.0.1", relay.port, "127.0.0.1", [KEY], time.monotonic() + 10)
            reader.settimeout(10)
            header, body = hostile(draw, source)
            expected = Request.body_bytes(header)
            reader.sendall(header + body + b"\0" * (expected - len(body)))
            answer = Answer.decode(receive(reader, ANSWER_HEADER_BYTES))
            data = receive(reader, answer.bytes)
            assert answer.status is not Status.WHOLE or OUTSIDE not in data
        except (OSError, WireError):
            closed += 1
            if reader is not None:
                reader.close()
            reader = None
    with good, contextlib.closing(reader) if reader is not None else contextlib.nullcontext():
        assert closed > 50
        assert process.memory_info().rss - before < GROWTH_BYTES_MAX
        assert process.num_threads() < 10


@pytest.mark.real
def test_without_the_key_nobody_is_let_in(served_here: tuple[RelayProcess, str, Fortress]):
    relay, _, _ = served_here
    with pytest.raises(WireError, match="has another key"):
        dial("127.0.0.1", relay.port, "127.0.0.1", [handoff_key("other", "handoff")], time.monotonic() + 10)
    with pytest.raises(WireError, match="has another key"):
        dial("127.0.0.1", relay.port, "127.0.0.1", [handoff_key("secret", "other handoff")], time.monotonic() + 10)


@pytest.mark.real
def test_a_limit_holds_up_what_is_read_beside_training_and_not_the_pause():
    fortress = Fortress()
    with RelayProcess(stream_gbps_max=0.004) as relay, fortress.register(relay):
        with dial("127.0.0.1", relay.port, "127.0.0.1", [KEY], time.monotonic() + 10) as reader:
            half = np.array([[0, REGION_BYTES // 3], [REGION_BYTES // 3, REGION_BYTES // 3]])
            seconds = []
            for guard in (None, Guard("counter", 0, 8)):
                began = time.monotonic()
                for number in range(10):
                    assert ask(reader, Request(number, "rank", "state", half, guard))[0].status is Status.WHOLE
                seconds.append(time.monotonic() - began)
    # 0.43 MB at 0.5 MB/s; the first part is sent at once.
    assert seconds[0] < 0.5 < seconds[1]


def test_a_budget_sends_at_its_rate_and_holds_nothing_for_who_is_gone():
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def sent_at(size: int, *, is_there: bool = True) -> float | None:
        taken = budget.take(size, lambda: is_there)
        return round(now[0], 6) if taken else None

    budget = Budget(1_000.0, clock=lambda: now[0], sleep=sleep)
    assert [sent_at(500), sent_at(500), sent_at(0)] == [100.0, 100.45, 100.45]
    assert sent_at(10**9, is_there=False) is None and now[0] < 101
    assert [sent_at(250), sent_at(1)] == [100.95, 101.2]
    now[0] = 200.0
    assert [sent_at(500), sent_at(500)] == [200.0, 200.45], "of what was not used little is made up for"
    assert Budget(None, sleep=sleep).take(1 << 40) and now[0] == 200.45


def test_a_request_comes_back_as_it_was_sent():
    request = Request(7, "job/2/a/0", "exp_avg", np.array([[8, 16], [64, 4]]), Guard("counter", 3, 12))
    whole = request.encode()
    header, body = whole[:REQUEST_HEADER_BYTES], whole[REQUEST_HEADER_BYTES:]
    assert Request.body_bytes(header) == len(body)
    again = Request.decode(header, body)
    assert (again.number, again.source, again.kind, again.guard) == (7, "job/2/a/0", "exp_avg", request.guard)
    assert again.table.tolist() == request.table.tolist() and again.bytes == 20


def test_an_answer_that_promises_more_than_there_is_counts_as_broken():
    with pytest.raises(WireError, match="status 0"):
        Answer.decode(struct.pack("<QBqI", 1, Status.WHOLE, 0, BYTES_MAX + 1))
    with pytest.raises(WireError, match="status 9"):
        Answer.decode(struct.pack("<QBqI", 1, 9, 0, 0))


def test_a_process_that_has_ended_is_not_read():
    pid = os.fork()
    if not pid:
        os._exit(0)
    memory = ProcessMemory(pid, MYSELF)
    os.waitpid(pid, 0)
    with pytest.raises(UnreadableMemory):
        memory.word(0x1000, Block())
    with pytest.raises(UnreadableMemory, match="has ended"):
        memory.check_lives()
