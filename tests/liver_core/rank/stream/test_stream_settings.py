"""How long a tile may be: a GPU waits once for each, so there they are as long as they get."""

from __future__ import annotations

import torch

from liver_core.memory.memory_budget import TILE_ELEMENTS_MOST, derive
from liver_core.rank.stream.target_stream import StreamSettings

HOST, GPU = torch.device("cpu"), torch.device("cuda")


def test_tiles_are_short_in_host_memory_and_long_on_a_gpu():
    assert (StreamSettings().longest_tile(HOST), StreamSettings().longest_tile(GPU)) == (1 << 20, 1 << 24)


def test_a_length_that_is_asked_for_holds_on_every_device():
    assert {StreamSettings(tile_elements=4096).longest_tile(device) for device in (HOST, GPU)} == {4096}


def test_no_longer_tile_is_asked_for_than_a_budget_without_limit_gives():
    sizes = derive(None, taken_bytes=0, gradient_bytes=0, target_numel=1 << 30)
    assert sizes.tile_elements == TILE_ELEMENTS_MOST == StreamSettings().longest_tile(GPU)
