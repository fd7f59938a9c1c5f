"""Tile size and ring depth come out of one budget, or are refused with numbers; headers fit their bytes. Pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.streaming.header import HEADER_BYTES, HeaderError, StepHeader
from liver_core.streaming.memory_budget import (
    DEPTH_LEAST,
    TILE_ELEMENTS_LEAST,
    BudgetRefused,
    derive,
    replay_bytes,
    ring_bytes,
)


@given(st.integers(0, 2**31), st.integers(0, 2**30), st.integers(0, 2**26), st.integers(0, 2**26))
def test_what_is_derived_fits_the_budget_and_wastes_no_slot(budget: int, taken: int, source: int, target: int):
    try:
        sizes = derive(budget, taken_bytes=taken, source_numel=source, target_numel=target)
    except BudgetRefused as refused:
        least = min(TILE_ELEMENTS_LEAST, target)
        needed = replay_bytes(least) + (ring_bytes(source, DEPTH_LEAST) if source else 0)
        assert needed > budget - taken
        assert str(needed) in str(refused) and str(budget) in str(refused)
        return
    assert sizes.bytes <= budget - taken
    assert sizes.bytes == replay_bytes(sizes.tile_elements) + (ring_bytes(source, sizes.depth) if source else 0)
    assert sizes.tile_elements >= min(TILE_ELEMENTS_LEAST, target)
    assert sizes.depth == 0 if not source else DEPTH_LEAST <= sizes.depth <= 4


def test_without_a_limit_a_ring_is_as_deep_as_wanted_and_a_tile_no_longer_than_the_region():
    sizes = derive(None, taken_bytes=5, source_numel=1000, target_numel=300, depth_wanted=6)
    assert (sizes.tile_elements, sizes.depth) == (300, 6)


HEADER = StepHeader(3, 0.1 + 0.2, 1.0, ({"key": "a", "lr": 1e-3, "weight_decay": 0.0},), {"step": 2.0}, True, 0.5)


def test_a_header_comes_back_as_it_was():
    data = HEADER.encode()
    assert len(data) == HEADER_BYTES
    assert StepHeader.decode(data) == HEADER


@pytest.mark.parametrize("data", [b"", b"\0" * HEADER_BYTES, b"{}", b"[1]", HEADER.encode()[:100], b"\xff" * 50])
def test_bytes_that_are_no_header_are_refused(data: bytes):
    with pytest.raises(HeaderError):
        StepHeader.decode(data)


def test_a_header_that_does_not_fit_is_refused_with_numbers():
    long = StepHeader(3, 1.0, 1.0, ({"key": "x" * HEADER_BYTES},), {}, False)
    with pytest.raises(HeaderError, match=f"at most {HEADER_BYTES}"):
        long.encode()
