"""What a handoff may take of a GPU where no limit is given: what the driver has free, and what torch keeps of the world
before. Nothing runs on a GPU here; its figures are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_core.memory.overheads import default_budget
from liver_core.rank import retire
from liver_core.rank.prepare.memory_plan import _free_for_a_handoff
from liver_core.rank.retire import Retirement

GB = 10**9


def test_without_a_gpu_there_is_no_limit():
    assert _free_for_a_handoff(4, 9 * GB) is None


@pytest.mark.parametrize(("kept", "counted"), [(0, 0), (9 * GB, 9 * GB), (25 * GB, 18 * GB)])
def test_what_torch_keeps_of_a_freed_world_is_free_as_far_as_it_is_not_taken_again(
    monkeypatch: pytest.MonkeyPatch, kept: int, counted: int
):
    figures = {
        "is_available": True,
        "mem_get_info": (10 * GB, 80 * GB),
        "memory_reserved": 30 * GB,
        "memory_allocated": 12 * GB,
    }
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda figure=figure: figure)
    assert _free_for_a_handoff(4, kept) == default_budget(10 * GB + counted, 80 * GB, 4) > 0


def test_a_world_that_was_freed_is_known_to_the_one_that_trains(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retire, "retire", lambda world: None)
    monkeypatch.setattr(retire, "free", lambda live: 7 * GB)
    live = SimpleNamespace(kept_bytes=0)
    following: Any = SimpleNamespace(live=live, transport=None, end_streams=list, end_rescue=list)
    old: Any = SimpleNamespace(world=None, live=None, state=None)
    Retirement("h1", old, following)._free()
    assert live.kept_bytes == 7 * GB
    Retirement("h2", None, following)._free()
    assert live.kept_bytes == 7 * GB, "a newcomer has no world before"
