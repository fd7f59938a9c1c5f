"""Bytes that came over sockets, spread over a device in few copies; and when a block may be filled again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from liver_core.device.region import Region
from liver_core.transport import landing_blocks
from liver_core.transport.landing_blocks import COPIES_MAX, LandingBlocks, spread
from liver_core.transport.regions import RegionBytes


@pytest.mark.parametrize("runs", [1, COPIES_MAX, COPIES_MAX + 1, 3_000])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_block_is_spread_over_a_device_as_over_the_host(monkeypatch: pytest.MonkeyPatch, runs: int, size: int):
    draw = np.random.default_rng(runs + size)
    lengths = size * draw.integers(1, 9, runs)
    lengths[runs // 2] = size * 5_000
    starts = np.cumsum(lengths + size * draw.integers(0, 3, runs)) - lengths
    half, whole = 8 * int(starts[runs // 2] // 8), 8 * int((starts[-1] + lengths[-1]) // 8 + 1)
    table = np.stack([starts, starts, lengths], axis=1)
    # No run crosses from one piece to the next.
    table = table[(starts >= half) | (starts + lengths <= half)] if half else table
    block = torch.randint(1, 255, (int(table[:, 2].sum()),), dtype=torch.uint8)
    found = []
    for is_host in (True, False):
        monkeypatch.setattr(landing_blocks, "is_host", lambda device, is_host=is_host: is_host)
        memory = torch.zeros(whole + 8, dtype=torch.uint8)[8:]
        pieces = [memory[:half], torch.zeros(whole, dtype=torch.uint8)[half:]] if half else [memory]
        spread(block, RegionBytes(Region(pieces)), table)
        found.append(torch.cat(pieces))
    assert torch.equal(*found) and int(found[0].count_nonzero()) == len(block)


def test_many_short_runs_are_copied_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(landing_blocks, "is_host", lambda device: False)
    copies, one_by_one = [], landing_blocks._copy_rows
    monkeypatch.setattr(landing_blocks, "_copy_rows", lambda *run: copies.append(run) or one_by_one(*run))
    lengths = np.tile([4, 8, 4, 12, 40_000], 40)
    starts = np.cumsum(lengths + np.arange(200)) - lengths
    target = torch.zeros(int(starts[-1] + lengths[-1]), dtype=torch.uint8)
    spread(
        torch.ones(int(lengths.sum()), dtype=torch.uint8),
        RegionBytes(Region([target])),
        np.stack([starts, starts, lengths], axis=1),
    )
    assert int(target.sum()) == lengths.sum() and len(copies) == 40


class Late:
    """A moment that has not come."""

    def passed(self) -> bool:
        return False


def test_a_block_is_not_filled_again_while_a_device_may_still_read_it(monkeypatch: pytest.MonkeyPatch):
    awaited: list[object] = []
    monkeypatch.setattr(landing_blocks, "mark", lambda device: Late())
    monkeypatch.setattr(landing_blocks, "await_event", lambda why, device, event: awaited.append(event))
    blocks, device = LandingBlocks(64), torch.device("cpu")
    first, second = blocks.take(device), blocks.take(device)
    blocks.give_back(first, device)
    third = blocks.take(device)
    assert third.data_ptr() not in (first.data_ptr(), second.data_ptr()) and not awaited
    blocks.give_back(second, device)
    assert blocks.take(device) is first and len(awaited) == 1
