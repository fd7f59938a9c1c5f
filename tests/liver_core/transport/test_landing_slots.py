"""Reads that reach their target over a stage, as those from a GPU into host memory do; all of it on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from liver_core.device.region import as_region
from liver_core.transport import nixl
from liver_core.transport.landing_slots import SLOT_BYTES, SLOTS, LandingSlots
from liver_core.transport.nixl import NixlTransport, _Post, must_stage
from liver_core.transport.protocol import Read, TransportError
from liver_core.transport.regions import RegionBytes
from tests.liver_core.transport.ranks import Rank, Run, run_ranks
from tests.liver_core.transport.test_contract import (
    NUMEL,
    connected,
    leave,
    numbers,
    read_from_everybody,
    same_bits,
    soon,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

BATCH_BYTES = 4096


def test_only_what_lies_on_a_device_and_goes_to_the_host_is_staged():
    assert must_stage("VRAM", torch.zeros(1))
    assert not must_stage("DRAM", torch.zeros(1))


def test_what_is_read_over_a_stage_is_what_was_read():
    assert run_ranks("nixl", 3, stage_everything) == [True] * 3


def test_more_batches_than_slots_take_turns():
    assert run_ranks("nixl", 2, read_many_batches) == [True, True]


def test_batches_of_a_peer_may_land_in_any_order():
    # Over CUDA's copies they do.
    post, other = (_Post("master", (("master", np.zeros((2, 3), dtype=np.int64)),)) for _ in range(2))
    flying = [post, other]
    flying.remove(other)
    assert flying == [post]


def test_a_read_that_fails_keeps_no_slot():
    assert run_ranks("nixl", 2, read_from_one_that_is_gone) == [True, None]


@pytest.mark.parametrize("runs", [1, 64, 65, 500])
def test_runs_are_packed_in_a_slot_and_spread_from_there(runs: int):
    stage = LandingSlots(torch.device("cpu"))
    slots = [stage.take(), stage.take(), stage.take()]
    assert slots[2] is None and len(set(slots)) == SLOTS + 1
    slot = slots[0]
    assert slot is not None
    lengths = np.arange(1, runs + 1)
    places = np.cumsum(lengths + 3) - lengths
    table = np.stack([7 * places, places, lengths], axis=1)
    rows = stage.packed(slot, table)
    base = stage.memory.data_ptr() + slot * SLOT_BYTES
    assert rows[:, 1].tolist() == lengths.tolist()
    assert rows[0, 0] == base and (np.diff(rows[:, 0]) == lengths[:-1]).all()
    content = torch.randint(1, 255, (int(lengths.sum()),), dtype=torch.uint8)
    stage.memory[slot * SLOT_BYTES :][: len(content)] = content
    target = torch.zeros(int(places[-1] + lengths[-1]) + 5, dtype=torch.uint8)
    stage.unload(slot, table, RegionBytes(as_region(target)))
    written = torch.cat([target[at : at + length] for at, length in zip(places, lengths, strict=True)])
    assert torch.equal(written, content)
    assert int(target.count_nonzero()) == len(content), "nothing between the runs"
    stage.give_back(slot)
    assert stage.take() == slot


def staged() -> None:
    """From now on all that this process reads is staged, in small batches."""
    nixl.must_stage = lambda memory, target: True
    nixl.STAGED_BYTES_MAX = BATCH_BYTES


def stage_everything(rank: Rank) -> bool:
    staged()
    return read_from_everybody(rank)


def read_many_batches(rank: Rank) -> bool:
    staged()
    target = torch.zeros(NUMEL)
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
    assert isinstance(endpoint, NixlTransport)
    assert 4 * NUMEL > 10 * SLOTS * BATCH_BYTES
    report = endpoint.read([Read(1 - rank.rank, "master", (Run(0, 0, NUMEL),))], soon(10))
    assert report.bytes == 4 * NUMEL
    assert same_bits(target, numbers(1 - rank.rank))
    assert endpoint._slots is not None and free(endpoint._slots) == SLOTS
    leave(rank, endpoint)
    return True


def read_from_one_that_is_gone(rank: Rank) -> bool:
    staged()
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": torch.zeros(NUMEL)})
    assert isinstance(endpoint, NixlTransport)
    read = [Read(1, "master", (Run(0, 0, NUMEL),))]
    if rank.rank == 0:
        endpoint.read(read, soon(10))
    rank.exchange()
    if rank.rank == 1:
        rank.die()
    rank.exchange()
    for _ in range(SLOTS + 1):
        with pytest.raises(TransportError):
            endpoint.read(read, soon(5))
        assert endpoint._slots is None or free(endpoint._slots) == SLOTS
    leave(rank, endpoint)
    return True


def free(stage: LandingSlots) -> int:
    slots = [stage.take() for _ in range(SLOTS + 1)]
    taken = [slot for slot in slots if slot is not None]
    for slot in taken:
        stage.give_back(slot)
    return len(taken)
