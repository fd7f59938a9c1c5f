"""What is measured of a wire, over a transport in memory."""

from __future__ import annotations

import pytest

from liver_core.transport import wire_check
from liver_core.transport.mixed import MixedTransport, Wire
from liver_core.transport.protocol import TransportError
from liver_core.transport.wire_check import LATENCY_READS, REGION_BYTES, measure, offer
from tests.liver_core.transport.in_memory import Fault, FaultKind, InMemoryTransport, MemoryNetwork
from tests.liver_core.transport.test_contract import soon


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    monkeypatch.setattr(wire_check, "READ_S", 0.2)
    return MemoryNetwork()


def mixed(transport: InMemoryTransport) -> MixedTransport:
    return MixedTransport(transport.name, {"memory": transport})


def test_a_wire_is_read_for_a_while_and_no_more_than_allowed(network: MemoryNetwork):
    source, reader = mixed(InMemoryTransport("source", network)), mixed(InMemoryTransport("reader", network))
    speed = measure(reader, offer(source), soon(), bytes_max=8 * REGION_BYTES)
    assert speed.wire == Wire("memory") and speed.bytes_per_s > 0 and 0 < speed.latency_s < 0.1


@pytest.mark.parametrize(("bytes_max", "most"), [(8 << 20, 8 << 20), (64, 64 * 2), (REGION_BYTES, REGION_BYTES)])
def test_a_limit_holds_for_all_that_is_read(network: MemoryNetwork, bytes_max: int, most: int):
    class Counting(InMemoryTransport):
        moved = 0

        def read(self, reads, deadline):
            report = super().read(reads, deadline)
            self.moved += report.bytes
            return report

    reader = Counting("reader", network)
    measure(mixed(reader), offer(mixed(InMemoryTransport("source", network))), soon(), bytes_max=bytes_max)
    assert reader.moved - LATENCY_READS * 64 <= most


def test_a_source_that_ends_is_an_error_and_no_figure(network: MemoryNetwork):
    source, reader = mixed(InMemoryTransport("source", network)), mixed(InMemoryTransport("reader", network))
    address = offer(source)
    network.inject("source", Fault(FaultKind.DIE))
    with pytest.raises(TransportError):
        measure(reader, address, soon(), bytes_max=REGION_BYTES)
