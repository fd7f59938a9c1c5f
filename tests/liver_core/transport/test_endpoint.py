"""The endpoint that ranks use in a handoff: how it reads a peer, and what it does while the store stalls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from liver_core.handoff.messages import StoreAddress
from liver_core.transport.protocol import Read, Transport, TransportError
from tests.liver_core.transport import ranks
from tests.liver_core.transport.ranks import Rank, Run
from tests.liver_core.transport.relays import RelayProcess
from tests.liver_core.transport.test_contract import NUMEL, connected, leave, numbers, same_bits

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

STORE = (
    "from torch.distributed import TCPStore\n"
    "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
    "print(store.port, flush=True)\n"
    "input()\n"
)
ANSWER_S = 0.5
PATIENCE_S = 10.0


@pytest.fixture
def store() -> Iterator[tuple[StoreAddress, int]]:
    """A store in a process of its own, and its pid."""
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield StoreAddress("127.0.0.1", int(process.stdout.readline())), process.pid
        process.kill()


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liver_core.transport.endpoint.STORE_ANSWER_S", ANSWER_S)


def serving(name: str, store: StoreAddress) -> Transport:
    from liver_core.transport.endpoint import make_endpoint

    endpoint = make_endpoint(name, "127.0.0.1", store)
    endpoint.register(sources={"master": torch.zeros(8)})
    endpoint.address()
    endpoint.start_progress()
    return endpoint


def test_an_endpoint_is_closed_although_the_store_stalls(
    store: tuple[StoreAddress, int], monkeypatch: pytest.MonkeyPatch
):
    from liver_core.transport import gloo

    stalls, asked, take = threading.Event(), threading.Event(), gloo._Inbox.take

    def noted(inbox: gloo._Inbox) -> Iterator[bytes]:
        if stalls.is_set():
            asked.set()
        return take(inbox)

    monkeypatch.setattr(gloo._Inbox, "take", noted)
    address, pid = store
    endpoint = serving("job/2/s0", address)
    os.kill(pid, signal.SIGSTOP)
    stalls.set()
    assert asked.wait(5.0)
    closing = threading.Thread(target=endpoint.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive(), "it waits for a store that does not answer"


def test_a_source_is_not_asked_for_ever_through_a_store_that_stalls(store: tuple[StoreAddress, int]):
    from liver_core.transport.endpoint import make_far

    address, pid = store
    source, target = (make_far(f"job/2/{place}", "127.0.0.1", address) for place in "st")
    source.register(sources={"master": torch.zeros(8)})
    published = source.address()
    os.kill(pid, signal.SIGSTOP)
    failed: list[TransportError] = []

    def connect() -> None:
        with pytest.raises(TransportError) as caught:
            target.connect(0, published, time.monotonic() + 1.0)
        failed.append(caught.value)

    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert failed, "it waits for a store that does not answer"


@pytest.mark.parametrize(
    ("nixl", "efa", "relay", "ways"),
    [
        (True, True, "relay", ["nixl", "efa", "relay", "gloo"]),
        (True, False, "relay", ["nixl", "relay", "gloo"]),
        (True, True, "", ["nixl", "efa", "gloo"]),
        (False, True, "relay", ["relay", "gloo"]),
        (False, False, "", ["gloo"]),
    ],
)
def test_ways_are_tried_in_one_order_on_all_machines(
    nixl: bool,
    efa: bool,
    relay: str,
    ways: list[str],
    store: tuple[StoreAddress, int],
    monkeypatch: pytest.MonkeyPatch,
):
    from liver_core.transport import endpoint
    from liver_core.transport.mixed import MixedTransport

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if nixl else None)
    monkeypatch.setattr(endpoint, "efa_devices", lambda: {"rdmap16s27": "0xefa2"} if efa else {})
    made = endpoint.make_endpoint("one", "127.0.0.1", store[0], relay)
    assert isinstance(made, MixedTransport)
    assert list(made._ways) == ways
    made.close()


def test_an_endpoint_of_a_machine_without_efa_starts_no_check(
    store: tuple[StoreAddress, int], monkeypatch: pytest.MonkeyPatch
):
    from liver_core.transport import efa, endpoint

    monkeypatch.setattr(efa, "why_failed", lambda *_: pytest.fail("it was checked"))
    monkeypatch.setattr(endpoint, "efa_devices", dict)
    endpoint.warm_up("127.0.0.1")
    serving("job/2/s0", store[0]).close()


def test_an_endpoint_reads_over_its_other_ways_where_efa_is_refused(
    store: tuple[StoreAddress, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from liver_core.transport import efa, endpoint

    monkeypatch.setattr(efa, "why_not_here", lambda: "libcuda.so.1 is missing: install NVIDIA's driver")
    monkeypatch.setattr(endpoint, "efa_devices", lambda: {"rdmap16s27": "0xefa2"})
    made = serving("job/2/s0", store[0])
    made.register(targets={"master": torch.zeros(8)})
    made.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["reads over efa are not possible here: libcuda.so.1 is missing: install NVIDIA's driver"]


@pytest.mark.parametrize(("tls", "way"), [("tcp", "relay"), ("", "nixl")])
def test_a_rank_with_a_gpu_is_read_over_nixl_where_that_reaches_it_and_else_over_the_relay(
    store: tuple[StoreAddress, int], tls: str, way: str
):
    with RelayProcess(module=ranks.RELAYS["relay-device"]) as relay:
        scenario = partial(read_from_a_gpu, store=store[0], relay=relay.local, tls=tls)
        assert ranks._on_processes("nixl", 2, scenario, 60.0, None) == [way, way]


def read_from_a_gpu(rank: Rank, *, store: StoreAddress, relay: str, tls: str) -> str:
    """`tls`: the wires that UCX has; with TCP alone it would have to emulate reads, as between machines without RDMA.
    NIXL has no model of a GPU, so what it reads is host memory, with the settings of a rank that has one."""
    from liver_core.transport import endpoint as ways
    from liver_core.transport.mixed import MixedTransport
    from liver_core.transport.nixl import NixlTransport
    from liver_core.transport.ucx import Ucx

    os.environ |= {"UCX_TLS": tls} if tls else {}
    ways._near = lambda name, host, _: NixlTransport(name, Ucx("lo", host_memory_only=False))
    ways.RelayTransport = ranks._relayed_from_device
    ranks._make = lambda kind, name, shared: ways.make_endpoint(name, "127.0.0.1", store, relay)
    target, other = torch.zeros(NUMEL), 1 - rank.rank
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
    endpoint.read([Read(other, "master", (Run(0, 0, NUMEL),))], time.monotonic() + 20)
    assert same_bits(target, numbers(other)) and endpoint.one_sided
    assert isinstance(endpoint, MixedTransport)
    way = endpoint.wire(other).way
    leave(rank, endpoint)
    return way
