"""Two budgets decide where each part of a next world waits: the device first, host memory else, or a refusal. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.layout import BucketRule, Manifest, ParallelLayout, StateKind
from liver_core.memory.memory_budget import replay_bytes
from liver_core.memory.memory_placement import (
    Area,
    MemoryPlacement,
    PlacementRefused,
    Room,
    Streaming,
    areas,
    cast_bytes,
    least_streaming,
    place,
    world_bytes,
)
from tests.liver_core.layout.models import KINDS, gpt

AREAS = (
    Area("master", 100, 100, ("master",)),
    Area("exp_avg", 100, 100, ("exp_avg",)),
    Area("exp_avg_sq", 100, 100, ("exp_avg_sq",)),
    Area("grad", 400, 100, ("grad",)),
    Area("weights", 200, 0),
)
WHOLE = 900


def names(placement: MemoryPlacement) -> tuple[str, ...]:
    return tuple(area.name for area in placement.on_host)


@pytest.mark.parametrize(
    ("device", "host", "on_host"),
    [
        (None, 0, ()),
        (WHOLE, 0, ()),
        (WHOLE - 1, 1, ("weights",)),
        (700, 1, ("weights",)),
        (699, 100, ("grad",)),  # 500 on the device
        (499, 1000, ("grad", "weights")),
        (299, 1000, ("exp_avg_sq", "grad", "weights")),
        (0, 400, ("master", "exp_avg", "exp_avg_sq", "grad", "weights")),
        (0, 399, None),
    ],
)
def test_the_device_holds_what_is_touched_most_and_the_host_the_rest(device: int | None, host: int, on_host):
    room = Room(device, host, held_bytes=WHOLE)
    if on_host is None:
        with pytest.raises(PlacementRefused):
            place(AREAS, room, 3)
        return
    assert names(place(AREAS, room, 3)) == on_host


def test_one_byte_too_few_of_either_memory_is_refused_with_numbers():
    small = tuple(area for area in AREAS if area.name != "grad")
    assert names(place(small, Room(200, 300, held_bytes=WHOLE), 3)) == ("exp_avg_sq", "weights")
    assert names(place(small, Room(299, 100, held_bytes=WHOLE), 3)) == ("exp_avg_sq", "weights")
    with pytest.raises(PlacementRefused, match=r"extra_bytes_max: .* needs 500 bytes on rank 3, budget is 499$"):
        place(small, Room(499, 0), 3)
    with pytest.raises(PlacementRefused, match=r"host_bytes_max: .* needs 100 bytes .* rank 3 beside 299 on .* is 99$"):
        place(small, Room(299, 99, held_bytes=WHOLE), 3)
    # The device has just enough, 500 less the 300 that the present world gives up; one region has to be elsewhere.
    with pytest.raises(PlacementRefused, match=r"host_bytes_max: .* needs 100 bytes .* rank 3 beside 200 on .* is 99$"):
        place(small, Room(200, 99, held_bytes=300), 3)
    with pytest.raises(PlacementRefused, match=r"extra_bytes_max: .* needs 200 bytes .* rank 3 even .* is 199$"):
        place(small, Room(199, 300, held_bytes=300), 3)


def test_what_the_device_holds_after_the_cutover_counts_too():
    assert names(place(AREAS, Room(400, 1000, held_bytes=500), 3)) == ("grad", "weights")
    with pytest.raises(PlacementRefused, match="needs 401 bytes on the device of rank 3"):
        place(AREAS, Room(400, 1000, held_bytes=499), 3)


def test_room_for_streaming_is_kept_where_there_is_any():
    """Windows of what waits in host memory take room on the device themselves."""
    pair = AREAS[:2]
    one, both = 100 + 50 + replay_bytes(10, 1), 50 + replay_bytes(10, 2)
    room = Room(None, 1000, held_bytes=WHOLE, stream=Streaming(ring_bytes=50, tile_elements=10))
    for budget, on_host in (
        (200 + 50 + replay_bytes(10), ()),
        (200 + 50 + replay_bytes(10) - 1, ("exp_avg",)),
        (one, ("exp_avg",)),
        (one - 1, ("master", "exp_avg")),
        (both, ("master", "exp_avg")),
        (both - 1, ()),  # nobody can stream, and without streaming it fits
    ):
        assert names(place(pair, replace(room, device_bytes_max=budget), 3)) == on_host, budget


def needed(placement: MemoryPlacement, room: Room) -> int:
    after = placement.world_bytes - room.held_bytes if placement.on_host else 0
    return max(placement.device_bytes, after)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5),
    st.integers(0, 200),
    st.integers(0, 200),
    st.integers(0, 250),
)
def test_a_placement_is_found_whenever_there_is_one_and_fits_both_budgets(sizes, device: int, host: int, held: int):
    wanted = tuple(Area(str(index), size, apart, (str(index),)) for index, (size, apart) in enumerate(sizes))
    room = Room(device, host, held_bytes=held)
    every = [
        MemoryPlacement(
            tuple(area for area, on in zip(wanted, where, strict=True) if on),
            tuple(area for area, on in zip(wanted, where, strict=True) if not on),
        )
        for where in product((True, False), repeat=len(wanted))
    ]
    fitting = [each for each in every if needed(each, room) <= device and each.host_bytes <= host]
    try:
        found = place(wanted, room, 0)
    except PlacementRefused as refused:
        assert not fitting
        assert str(device) in str(refused) or str(host) in str(refused)
        return
    assert found == fitting[0]


def manifest(dtype: str = "float32", rule: BucketRule | None = None) -> Manifest:
    made = gpt(rule=rule)
    kinds = (*KINDS, StateKind("grad", "float32"))
    return replace(made, parameters=tuple(replace(spec, dtype=dtype) for spec in made.parameters), kinds=kinds)


def test_masters_of_fp32_lie_in_the_weights_however_many_buckets_there_are():
    whole = areas(manifest(), ParallelLayout.parse("DP2"), 0)
    assert [area.name for area in whole] == ["weights", "exp_avg", "exp_avg_sq", "grad"]
    region = whole[1].device_bytes
    assert whole[0] == Area("weights", 2 * region, region, ("master",))
    assert whole[3] == Area("grad", 2 * region, region, ("grad",))
    pieces = areas(manifest(rule=BucketRule(elements_max=3000)), ParallelLayout.parse("DP2"), 0)
    assert [(area.name, area.kinds) for area in pieces] == [(area.name, area.kinds) for area in whole]


def test_weights_of_bf16_take_half_and_nothing_in_host_memory():
    found = areas(manifest("bfloat16"), ParallelLayout.parse("TP2xDP2"), 0)
    region = found[0].device_bytes
    assert found[0] == Area("master", region, region, ("master",))
    assert found[-1] == Area("weights", region, 0)
    assert world_bytes(manifest("bfloat16"), ParallelLayout.parse("TP2xDP2")) == 6 * region


def test_gradients_of_16_bits_take_half_and_a_window_and_a_copy_of_them_are_fp32():
    layout = ParallelLayout.parse("DP2")
    held = manifest("bfloat16")
    narrow = replace(held, kinds=(*held.kinds[:-1], StateKind("grad", "parameter")))
    (wide, *_), (found, *_) = (
        [area for area in areas(each, layout, 0) if area.name == "grad"] for each in (held, narrow)
    )
    assert (2 * found.device_bytes, 2 * found.host_bytes) == (wide.device_bytes, wide.host_bytes)
    assert [MemoryPlacement((area,), ()).staged_kinds for area in (wide, found)] == [0, 1]
    assert [MemoryPlacement((), (area,)).staged_kinds for area in (wide, found)] == [1, 1]
    assert (cast_bytes(held, layout, 0), cast_bytes(narrow, layout, 0)) == (0, wide.host_bytes)


def test_where_some_masters_lie_in_the_weights_all_wait_and_move_in_together():
    layout, held = ParallelLayout.parse("DP2"), manifest("bfloat16")
    norms = tuple(replace(spec, dtype="float32") if len(spec.shape) == 1 else spec for spec in held.parameters)
    found = areas(replace(held, parameters=norms), layout, 0)
    assert [(area.name, area.kinds) for area in found] == [
        ("weights", ("master",)),
        *((kind, (kind,)) for kind in ("exp_avg", "exp_avg_sq", "grad")),
    ]
    region, fp32 = found[1].device_bytes, 9 * 32 * 4
    shares = region // 4  # Elements of one of the two ranks; padding of the norms is fp32 too.
    wide = -(-fp32 // 4 // 128) * 128
    assert found[0].device_bytes == 4 * wide + 2 * (2 * shares - wide) + 4 * (2 * shares - wide) // 2
    assert found[0].host_bytes == region


def test_more_copies_in_the_next_worlds_first_step_need_room_too():
    room = Room(WHOLE, 0, cast_bytes=1)
    with pytest.raises(PlacementRefused):
        place(AREAS, room, 3)
    assert names(place(AREAS, replace(room, device_bytes_max=WHOLE + 1), 3)) == ()
    with pytest.raises(PlacementRefused, match="needs 402 bytes on the device of rank 3"):
        place(AREAS, Room(401, 1000, held_bytes=499, cast_bytes=1), 3)


def test_streaming_needs_its_ring_and_the_least_tile_at_least():
    assert least_streaming(50, 2**20) == Streaming(50, 2**16)
    assert least_streaming(0, 300) == Streaming(0, 300)


def test_the_fullest_rank_of_a_world_is_that_of_the_largest_stage():
    layout = ParallelLayout.parse("PP2")
    sums = [sum(area.device_bytes for area in areas(manifest(), layout, stage)) for stage in range(2)]
    assert sums[0] != sums[1] and world_bytes(manifest(), layout) == max(sums)
