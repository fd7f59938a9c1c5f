"""Versioned reads see a tile whole or say that it is torn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from liver_core.transport.in_memory import InMemoryTransport, MemoryNetwork
from liver_core.transport.protocol import Read, ReadReport, TransportError
from liver_core.transport.versioned import VersionedRead, read_versioned
from tests.liver_core.transport.ranks import Rank, Run, run_ranks
from tests.liver_core.transport.test_contract import connected, leave, soon

ELEMENTS = 20_000
TILE = [Read(0, "master", (Run(0, 0, ELEMENTS),))]
COUNTER = Read(0, "version", (Run(0, 0, 1),))


class Interfering(InMemoryTransport):
    """Lets its owner's peer do something after every read."""

    after_read: Callable[[int], None] = staticmethod(lambda count: None)
    reads = 0

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        report = super().read(reads, deadline)
        self.reads += 1
        self.after_read(self.reads)
        return report


@pytest.mark.parametrize(
    ("start", "bump_after", "version"),
    [(8, None, 8), (7, None, None), (8, 1, None), (8, 2, None), (8, 3, 8)],
    ids=["quiet", "while stepping", "before the tile", "after the tile", "after it all"],
)
def test_a_tile_is_believed_only_between_two_equal_even_counters(start, bump_after, version):
    master, counter, landing = torch.ones(ELEMENTS), torch.tensor([start]), torch.zeros(1, dtype=torch.int64)
    reader = reader_of(master, counter, landing)

    def bump(count: int) -> None:
        if count == bump_after:
            counter.add_(2)

    reader.after_read = bump
    found = read_versioned(reader, TILE, counter=COUNTER, landing=landing, deadline=soon())
    assert found.version == version
    assert (found.before, found.after) == (start, start + (2 if bump_after in (1, 2) else 0))
    assert found.report.bytes == 4 * ELEMENTS


def test_a_tile_from_two_peers_or_a_two_sided_transport_is_refused():
    landing = torch.zeros(1, dtype=torch.int64)
    reader = reader_of(torch.ones(ELEMENTS), torch.tensor([2]), landing)
    with pytest.raises(TransportError, match="one peer"):
        read_versioned(reader, [Read(1, "master", ())], counter=COUNTER, landing=landing, deadline=soon())
    reader.one_sided = False
    with pytest.raises(TransportError, match="one-sided"):
        read_versioned(reader, TILE, counter=COUNTER, landing=landing, deadline=soon())


@pytest.mark.real
@pytest.mark.timeout(60)
def test_over_nixl_tiles_of_a_source_that_never_stops_stepping_are_never_mixed():
    whole, torn = run_ranks("nixl", 2, read_while_stepping)[1]
    assert whole > 0
    assert whole + torn == 400


def read_while_stepping(rank: Rank) -> tuple[int, int]:
    """Rank 0 steps until rank 1 says stop over a region of its own; rank 1 counts whole and torn tiles."""
    master, version = torch.zeros(ELEMENTS), torch.zeros(1, dtype=torch.int64)
    target, landing = torch.zeros(ELEMENTS), torch.zeros(1, dtype=torch.int64)
    sources = {"master": master, "version": version}
    endpoint = connected(rank, sources, {"master": target, "version": landing})
    if rank.rank == 0:
        counts = step_until_told(rank, master, version)
    else:
        counts = count_tiles(endpoint, target, landing)
        rank.exchange()
    leave(rank, endpoint)
    return counts


def step_until_told(rank: Rank, master: torch.Tensor, version: torch.Tensor) -> tuple[int, int]:
    rank.hub.send(("exchange", b""))
    while not rank.hub.poll():
        version += 1
        master.fill_(float(version.item() + 1))
        version += 1
        rank.hub.poll(0.0005)  # Between two steps there is time, as in training.
    rank.hub.recv()
    return 0, 0


def count_tiles(endpoint, target: torch.Tensor, landing: torch.Tensor) -> tuple[int, int]:
    found: list[VersionedRead] = []
    for _ in range(400):
        found.append(read_versioned(endpoint, TILE, counter=COUNTER, landing=landing, deadline=soon()))
        if found[-1].version:
            assert target.min() == target.max() == float(found[-1].version)
    whole = sum(each.version is not None for each in found)
    return whole, len(found) - whole


def reader_of(master: torch.Tensor, counter: torch.Tensor, landing: torch.Tensor) -> Interfering:
    network = MemoryNetwork()
    source, reader = InMemoryTransport("source", network), Interfering("reader", network)
    source.register(sources={"master": master, "version": counter})
    reader.register(targets={"master": torch.zeros(ELEMENTS), "version": landing})
    reader.connect(0, source.address(), soon())
    return reader
