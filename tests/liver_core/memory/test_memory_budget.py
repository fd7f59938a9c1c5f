"""Tile size and ring depth come out of one budget, or are refused with numbers; headers fit their bytes. Pure."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.memory.memory_budget import (
    DEPTH_LEAST,
    TILE_ELEMENTS_LEAST,
    BudgetRefused,
    StreamingSizes,
    derive,
    replay_bytes,
    ring_bytes,
)
from liver_core.memory.overheads import DeviceOverheads, default_budget
from liver_core.streaming.header import HEADER_BYTES, HeaderError, StepHeader


@given(st.integers(0, 2**31), st.integers(0, 2**30), st.integers(0, 2**26), st.integers(0, 2**26))
def test_what_is_derived_fits_the_budget_and_wastes_no_slot(budget: int, taken: int, source: int, target: int):
    try:
        sizes = derive(budget, taken_bytes=taken, gradient_bytes=source, target_numel=target)
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
    sizes = derive(None, taken_bytes=5, gradient_bytes=4000, target_numel=300, depth_wanted=6)
    assert (sizes.tile_elements, sizes.depth) == (300, 6)


def test_what_a_ring_and_a_window_take_by_hand():
    assert ring_bytes(40, 3) == 8 + 3 * (8 + 16_384 + 40)
    assert (replay_bytes(10), replay_bytes(10, 2)) == (160, 240)


def test_no_tile_is_longer_than_the_longest_and_a_rank_that_is_no_source_has_no_ring():
    assert derive(None, taken_bytes=0, gradient_bytes=0, target_numel=2**26) == StreamingSizes(2**24, 0, 2**28)
    assert derive(2**40, taken_bytes=0, gradient_bytes=0, target_numel=2**26) == StreamingSizes(2**24, 0, 2**28)
    assert derive(2**40, taken_bytes=0, gradient_bytes=10, target_numel=0) == StreamingSizes(0, 4, ring_bytes(10, 4))


@pytest.mark.parametrize("staged", [0, 2])
def test_a_further_slot_comes_before_a_longer_tile_as_soon_as_it_fits(staged: int):
    def sizes(budget: int) -> tuple[int, int]:
        found = derive(
            budget + 7, taken_bytes=7, gradient_bytes=4000, target_numel=2**20, depth_wanted=3, staged_kinds=staged
        )
        assert found.bytes == ring_bytes(4000, found.depth) + replay_bytes(found.tile_elements, staged)
        return found.tile_elements, found.depth

    least, element = replay_bytes(TILE_ELEMENTS_LEAST, staged), replay_bytes(1, staged)
    three = ring_bytes(4000, 3) + least
    longer = (ring_bytes(4000, 3) - 1 - ring_bytes(4000, 2)) // element
    assert sizes(ring_bytes(4000, 2) + least) == (TILE_ELEMENTS_LEAST, 2)
    assert sizes(three - 1) == (TILE_ELEMENTS_LEAST + longer, 2)
    assert sizes(three) == (TILE_ELEMENTS_LEAST, 3)
    assert sizes(three + 5 * element) == sizes(three + 6 * element - 1) == (TILE_ELEMENTS_LEAST + 5, 3)


def test_a_budget_that_is_spent_has_nothing_left_and_a_ring_needs_two_slots():
    needed = ring_bytes(4000, 2) + replay_bytes(300)
    with pytest.raises(BudgetRefused) as refused:
        derive(100, taken_bytes=101, gradient_bytes=4000, target_numel=300)
    assert str(refused.value) == (
        f"extra_bytes_max: streaming needs {needed} bytes (2 slots of 4000 bytes, tiles of 300 elements), "
        "of 100 bytes 0 are left"
    )
    assert derive(None, taken_bytes=0, gradient_bytes=1, target_numel=1, depth_wanted=2).depth == 2
    with pytest.raises(ValueError, match="depth_wanted is 1, at least 2"):
        derive(None, taken_bytes=0, gradient_bytes=1, target_numel=1, depth_wanted=1)


HEADER = StepHeader(3, 0.1 + 0.2, 1.0, ({"key": "a", "lr": 1e-3, "weight_decay": 0.0},), {"step": 2.0}, True, 0.5, 0.4)


def test_a_header_comes_back_as_it_was():
    data = HEADER.encode()
    assert len(data) == HEADER_BYTES
    assert StepHeader.decode(data) == HEADER


@pytest.mark.parametrize("data", [b"", b"\0" * HEADER_BYTES, b"{}", b"[1]", HEADER.encode()[:100], b"\xff" * 50])
def test_bytes_that_are_no_header_are_refused(data: bytes):
    with pytest.raises(HeaderError):
        StepHeader.decode(data)


def test_a_header_may_take_all_its_bytes_and_no_more():
    spare = len(HEADER.encode()) - len(HEADER.encode().rstrip())
    full = replace(HEADER, scalars={"step": 2.0, "name": "x" * (spare - len(', "name": ""'))})
    assert not full.encode().endswith(b" ") and StepHeader.decode(full.encode()) == full
    longer = replace(full, groups=(*full.groups, {}))
    with pytest.raises(HeaderError, match=rf"version 3 has {HEADER_BYTES + len(', {}')} bytes, at most {HEADER_BYTES}"):
        longer.encode()


def test_a_header_that_does_not_fit_is_refused_with_numbers():
    long = StepHeader(3, 1.0, 1.0, ({"key": "x" * HEADER_BYTES},), {}, False)
    with pytest.raises(HeaderError, match=f"at most {HEADER_BYTES}"):
        long.encode()


def test_what_a_device_has_free_is_not_all_given_to_a_handoff():
    overheads = DeviceOverheads()
    whole = default_budget(40 * 10**9, 80 * 10**9, 8)
    beside = overheads.nccl_per_world + overheads.certificate + overheads.landing + overheads.relay
    assert whole == 40 * 10**9 - beside - 80 * 10**9 // 64
    assert default_budget(40 * 10**9, 80 * 10**9, 1) - whole == overheads.nccl_per_world
    assert default_budget(10**9, 80 * 10**9, 8) == 0
