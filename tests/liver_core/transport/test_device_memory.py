"""A relay and the memory of GPUs, over a model of CUDA's driver: what it gives, what it refuses, what it holds open."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from liver_core import cuda_driver
from liver_core.cuda_driver import CudaRefused
from liver_core.transport.protocol import Guard, TransportError
from liver_core.transport.relay import transport
from liver_core.transport.relay.device_memory import Gpus
from liver_core.transport.relay.exports import Exports
from liver_core.transport.relay.local import LocalRelay, NoRelay
from liver_core.transport.relay.memory import Block, Held, Place, ProcessMemory, ServedRank, UnreadableMemory
from liver_core.transport.relay.messages import BYTES_MAX, Request, Status, handoff_key
from liver_core.transport.relay.relay import TOKEN_BYTES, Relay, RelayConfig
from liver_core.transport.relay.sockets import dial
from liver_core.transport.relay.transport import RelayTransport
from tests.liver_core.transport.modelled_cuda import BUS_ID, ModelledCuda, mapping_of
from tests.liver_core.transport.relays import MYSELF
from tests.liver_core.transport.test_relay import ask

KEY = handoff_key("secret", "handoff")
BYTES = 1 << 20
LIMIT_S = 10.0


class OnDevice:
    """A rank in this process with state and a counter that is 8 on its GPU, and a second counter in host memory."""

    def __init__(self) -> None:
        self.cuda = ModelledCuda()
        self.state = np.random.default_rng(0).integers(1, 255, BYTES, dtype=np.uint8)
        self.counter, self.host_counter = np.array([8], dtype=np.int64), np.array([8], dtype=np.int64)
        self.exports = Exports(lambda: self.cuda)
        self.pieces = {"state": self.located(self.state), "counter": self.located(self.counter)}

    def located(self, memory: np.ndarray) -> list[tuple[int, int, int]]:
        return self.exports.located(0, [(memory.ctypes.data, memory.nbytes)])

    def served(self) -> ServedRank:
        held, process = Held(), ProcessMemory(os.getpid(), MYSELF)
        allocations = Gpus(lambda: self.cuda).open([list(each) for each in self.exports.allocations], held)
        places = {kind: allocations.place(pieces) for kind, pieces in self.pieces.items()}
        host = Place.of(process, [(self.host_counter.ctypes.data, 8)])
        return ServedRank(process, {**places, "host counter": host}, held)

    def expected(self, table: list[list[int]]) -> bytes:
        return b"".join(self.state[at : at + length].tobytes() for at, length in table)


def asked(table: list[list[int]], guard: Guard | None = None) -> Request:
    return Request(0, "rank", "state", np.array(table, dtype=np.int64), guard)


COLUMNS = [[at, 32] for at in range(64, 64 + 100 * 256, 256)]
TABLES = {
    "one run": ([[100, 5_000]], ["run"]),
    "columns": (COLUMNS, ["100 rows"]),
    "without gaps": ([[at, 32] for at in range(0, 3_200, 32)], ["run"]),
    "of several lengths": ([[0, 8], [10, 8], [20, 8], [7, 900], *COLUMNS], ["3 rows", "run", "100 rows"]),
    "backwards": ([[500, 8], [400, 8]], ["run", "run"]),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_chunk_is_gathered_in_as_few_copies_as_its_runs_allow(name: str):
    rank, (table, copies) = OnDevice(), TABLES[name]
    with Block() as block:
        assert rank.served().read(asked(table), block) == (True, 0)
        assert block.bytes[: sum(length for _, length in table)].tobytes() == rank.expected(table)
    assert rank.cuda.copies == copies


def test_rows_that_lie_too_far_apart_for_one_copy_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("liver_core.transport.relay.device_memory.PITCH_MAX", 255)
    rank = OnDevice()
    with Block() as block:
        rank.served().read(asked(COLUMNS), block)
        assert block.bytes[: 32 * len(COLUMNS)].tobytes() == rank.expected(COLUMNS)
    assert rank.cuda.copies == ["run"] * len(COLUMNS)


def test_no_copy_reaches_from_one_allocation_into_another():
    cuda = ModelledCuda()
    cuda.apart = 1 << 30
    memory = np.arange(256, dtype=np.uint8)
    cuda.enter(0)
    handles = [cuda.export(memory.ctypes.data + at).hex() for at in (0, 128)]
    held = Held()
    allocations = Gpus(lambda: cuda).open([[BUS_ID, handle] for handle in handles], held)
    place = allocations.place([[0, 64, 0], [0, 64, 1]])
    with Block() as block:
        served = ServedRank(ProcessMemory(os.getpid(), MYSELF), {"state": place}, held)
        served.read(asked([[0, 64], [64, 64]]), block)
        assert block.bytes[:128].tobytes() == memory[:64].tobytes() + memory[128:192].tobytes()
    assert cuda.copies == ["run", "run"]


def test_without_the_wait_for_its_copies_a_relay_would_send_what_was_there_before(monkeypatch: pytest.MonkeyPatch):
    rank, table = OnDevice(), [[0, 4_096]]
    monkeypatch.setattr(rank.cuda, "wait_for", lambda stream: None)
    monkeypatch.setattr(rank.cuda, "end_stream", lambda stream: None)
    with Block() as block:
        rank.served().read(asked(table), block)
        assert block.bytes[:4_096].tobytes() != rank.expected(table)


@pytest.mark.parametrize("kind", ["counter", "host counter"])
def test_a_guard_is_looked_at_before_and_after_the_bytes_are_there(kind: str, monkeypatch: pytest.MonkeyPatch):
    rank, request = OnDevice(), asked([[0, BYTES_MAX // 4]], Guard(kind, 0, 8))
    counter, served, waited = (
        rank.counter if kind == "counter" else rank.host_counter,
        rank.served(),
        rank.cuda.wait_for,
    )

    def rewritten(stream: int) -> None:
        """A step begins once bytes of the state are on their way."""
        waits_for_state = rank.cuda.copies[-1:] == ["run"] and len(rank.cuda.copies) == (2 if kind == "counter" else 1)
        waited(stream)
        if waits_for_state:
            counter[0] = 9

    with Block() as block:
        assert served.read(request, block) == (True, 8)
        assert block.bytes[: request.bytes].tobytes() == rank.expected([[0, request.bytes]]), "a look spoils no byte"
        rank.cuda.copies.clear()
        monkeypatch.setattr(rank.cuda, "wait_for", rewritten)
        assert served.read(request, block) == (False, 9)
        rank.cuda.copies.clear()
        assert served.read(request, block) == (False, 9)
        assert len(rank.cuda.copies) == (kind == "counter"), "nothing is read that the first look rules out"


def _beyond(rank: OnDevice) -> Iterator[tuple[str, Any]]:
    ((offset, size, number),) = rank.pieces["state"]
    room = mapping_of(os.getpid(), rank.state.ctypes.data)[1]
    yield "ends after its allocation", [[offset, room, number]]
    yield "ends after its allocation", [[room + 1, 0, number]]
    yield "ends after its allocation", [[2**64 - 8, 16, number]]
    yield "ends after its allocation", [[8, 2**64 - 8, number]]
    yield "lies in allocation 7 of", [[offset, size, 7]]
    for nonsense in ([[-1, size, number]], [], [[offset, size]], [["x", 1, 0]], [[offset, size, number], [1]], None):
        yield "pieces? of a region|a region has", nonsense


def test_no_piece_outside_its_allocation_is_taken():
    rank = OnDevice()
    allocations = Gpus(lambda: rank.cuda).open([list(each) for each in rank.exports.allocations], Held())
    for why, pieces in _beyond(rank):
        with pytest.raises(UnreadableMemory, match=why):
            allocations.place(pieces)


def test_no_allocation_is_taken_that_cuda_does_not_open():
    rank = OnDevice()
    good = list(rank.exports.allocations[0])
    for why, bad in {
        "CUDA_ERROR_INVALID_DEVICE": ["0000:99:00.0", good[1]],
        "CUDA_ERROR_INVALID_VALUE": [BUS_ID, "ff" * 64],
        "has 64 bytes": [BUS_ID, "ff"],
        "bus id of its GPU": [BUS_ID, 7],
        "a handle of CUDA": [BUS_ID, "no"],
    }.items():
        held = Held()
        with pytest.raises(UnreadableMemory, match=why):
            Gpus(lambda: rank.cuda).open([good, bad], held)
        held.close()
        assert not rank.cuda.opened, "what was opened before the bad one is closed"


def test_what_is_mapped_stays_so_until_the_last_read_has_ended_and_no_longer():
    rank = OnDevice()
    served, second = rank.served(), rank.served()
    assert rank.cuda.opened
    with served.held.reading():
        served.held.close()
        with pytest.raises(UnreadableMemory, match="has left"), Block() as block:
            served.read(asked([[0, 8]]), block)
        second.held.close()
        assert rank.cuda.opened, "somebody reads there"
    assert not rank.cuda.opened


@contextmanager
def relay_over(cuda: Callable[[], Any]) -> Iterator[Relay]:
    """In a thread of this process."""
    local = f"liver-test-relay-{uuid.uuid4().hex[:12]}"
    relay = Relay(RelayConfig(local, "127.0.0.1", (0, 0), (KEY,), (os.getuid(),)), cuda)
    thread = threading.Thread(target=relay.serve)
    thread.start()
    try:
        yield relay
    finally:
        relay.end()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def registered(relay: Relay, rank: OnDevice, name: str = "rank") -> LocalRelay:
    """With a token that is on the device."""
    token = np.frombuffer(os.urandom(TOKEN_BYTES), dtype=np.uint8).copy()
    regions = {**rank.pieces, "token": rank.located(token)}
    local = LocalRelay(relay.config.local)
    local.register(name, token.tobytes(), ["token"], regions, rank.exports.allocations)
    return local


def until(condition: Callable[[], bool]) -> bool:
    deadline, tick = time.monotonic() + LIMIT_S, threading.Event()
    while not condition() and time.monotonic() < deadline:
        tick.wait(0.01)
    return condition()


@pytest.mark.real
def test_a_rank_that_leaves_and_a_reader_that_is_gone_leave_nothing_of_cuda_behind():
    rank = OnDevice()
    with relay_over(lambda: rank.cuda) as relay:
        first, second = registered(relay, rank), registered(relay, rank, "second")
        with dial("127.0.0.1", relay.port, "127.0.0.1", [KEY], time.monotonic() + LIMIT_S) as reader:
            answer, data = ask(reader, asked(COLUMNS))
            assert answer.status is Status.WHOLE and data == rank.expected(COLUMNS)
            first.close()
            assert until(lambda: "rank" not in relay._endpoints)
            assert rank.cuda.opened, "the second endpoint has it too"
            assert ask(reader, asked(COLUMNS))[0].status is Status.REFUSED
            second.close()
            assert until(lambda: not rank.cuda.opened)
            assert rank.cuda.pinned and rank.cuda.streams
        assert until(lambda: not rank.cuda.pinned and not rank.cuda.streams)


@pytest.mark.real
def test_an_error_of_cuda_is_one_request_refused_with_its_name_and_no_other():
    rank, host = OnDevice(), np.full(64, 7, dtype=np.uint8)
    with relay_over(lambda: rank.cuda) as relay:
        local = LocalRelay(relay.config.local)
        local.register("other", host[:TOKEN_BYTES].tobytes(), ["host"], {"host": [(host.ctypes.data, 64)]})
        reader = dial("127.0.0.1", relay.port, "127.0.0.1", [KEY], time.monotonic() + LIMIT_S)
        with closing(local), closing(registered(relay, rank)), reader:
            for call in ("cuMemHostAlloc", "cuStreamCreate", "cuMemcpy2DAsync", "cuStreamSynchronize"):
                rank.cuda.refuse[call] = "CUDA_ERROR_UNKNOWN"
                answer, why = ask(reader, asked(COLUMNS))
                assert answer.status is Status.REFUSED and f"{call}: CUDA_ERROR_UNKNOWN" in why.decode()
                assert ask(reader, Request(0, "other", "host", np.array([[0, 64]])))[1] == host.tobytes()
                rank.cuda.refuse.clear()
            assert ask(reader, asked(COLUMNS))[1] == rank.expected(COLUMNS)
        assert until(lambda: len(rank.cuda.pinned) == 0)


@pytest.mark.real
def test_a_relay_that_may_not_open_the_memory_says_so_with_the_remedy_and_goes_on():
    rank = OnDevice()
    with relay_over(lambda: rank.cuda) as relay:
        rank.cuda.refuse["cuIpcOpenMemHandle"] = "CUDA_ERROR_INVALID_VALUE"
        with pytest.raises(NoRelay, match=r"cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE; .*--pid=host --ipc=host"):
            registered(relay, rank)
        rank.cuda.refuse.clear()
        good, rank.pieces["state"] = rank.pieces["state"], [(0, 2**60, 0)]
        with pytest.raises(NoRelay, match="ends after its allocation"):
            registered(relay, rank)
        assert until(lambda: not rank.cuda.opened)
        rank.pieces["state"] = good
        registered(relay, rank).close()


@pytest.mark.real
def test_a_token_on_the_device_that_is_another_is_found_out(monkeypatch: pytest.MonkeyPatch):
    rank = OnDevice()
    with relay_over(lambda: rank.cuda) as relay:
        monkeypatch.setattr(rank.cuda, "wait_for", lambda stream: None)
        monkeypatch.setattr(rank.cuda, "end_stream", lambda stream: None)
        with pytest.raises(NoRelay, match="read other bytes than there are"):
            registered(relay, rank)


def refusal_of(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any]) -> str:
    """What a rank is told whose state lies on a GPU, when it registers it."""
    monkeypatch.setattr(transport, "memory_of", lambda memory: "VRAM")
    endpoint = RelayTransport("rank", LocalRelay("nobody"), load)
    with pytest.raises(TransportError) as refused:
        endpoint.register(sources={"master": torch.zeros(8)})
    assert (refused.value.phase, refused.value.kind) == ("register", "master")
    endpoint.close()
    return refused.value.text


def test_memory_that_no_other_process_can_open_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch):
    cuda = ModelledCuda()
    cuda.refuse["is_exportable"] = ""
    said = refusal_of(monkeypatch, lambda: cuda)
    assert "leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF" in said and "MIG" not in said


def test_a_machine_that_offers_no_cuda_ipc_is_told_by_cudas_name_of_it(monkeypatch: pytest.MonkeyPatch):
    cuda = ModelledCuda()
    cuda.refuse["cuIpcGetMemHandle"] = "CUDA_ERROR_NOT_SUPPORTED"
    said = refusal_of(monkeypatch, lambda: cuda)
    assert "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED" in said and "MIG" in said


def test_a_process_without_the_driver_says_that_it_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "_loaded", None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    said = refusal_of(monkeypatch, cuda_driver.load)
    assert "CUDA's driver cannot be loaded: libcuda.so.1: cannot open shared object file" in said


class Library:
    """A libcuda in which each call leaves 7 where its first argument points, and `refused` is answered with 201."""

    def __init__(self, refused: str) -> None:
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        if name == "cuIpcCloseMemHandle":
            raise AttributeError(name)

        def answer(*arguments: Any) -> int:
            return 201 if name == self._refused else 0

        def name_of(status: Any, found: Any) -> int:
            found._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"
            return 0

        return name_of if name == "cuGetErrorName" else answer


def test_the_driver_names_call_and_error_of_what_it_refuses():
    driver = cuda_driver.LoadedDriver(Library("cuIpcOpenMemHandle_v2"))
    with pytest.raises(CudaRefused, match=r"^cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT$"):
        driver.open(bytes(64))
    with pytest.raises(CudaRefused, match="no cuIpcCloseMemHandle: it is too old"):
        driver.close(0)
    driver.wait_for(1)
