"""What streaming believes: over NIXL a tile between two equal even counters of its owner is never mixed."""

from __future__ import annotations

import pytest
import torch

from liver_core.transport.protocol import Read, Transport
from tests.liver_core.transport.ranks import Rank, Run, run_ranks
from tests.liver_core.transport.test_contract import connected, leave, soon

ELEMENTS = 20_000
TILE = [Read(0, "master", (Run(0, 0, ELEMENTS),))]
COUNTER = Read(0, "version", (Run(0, 0, 1),))


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


def count_tiles(endpoint: Transport, target: torch.Tensor, landing: torch.Tensor) -> tuple[int, int]:
    whole = 0
    for _ in range(400):
        endpoint.read([COUNTER], soon())
        before = int(landing[0])
        endpoint.read(TILE, soon())
        endpoint.read([COUNTER], soon())
        if before % 2 == 0 and before == int(landing[0]):
            assert target.min() == target.max() == float(before)
            whole += 1
    return whole, 400 - whole
