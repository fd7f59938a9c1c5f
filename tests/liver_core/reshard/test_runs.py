"""Runs: strided compression of box copies and joining of neighbours, hand-computed and against element ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.layout import Box
from liver_core.reshard import CopyRuns, PlanError
from liver_core.reshard.copy_runs import join_runs, runs_between


def test_a_column_slice_is_one_run_with_a_count_however_many_rows_it_has():
    whole, columns = Box((0, 0), (4096, 64)), Box((0, 16), (4096, 32))
    (run,) = runs_between(whole, 100, columns, 7, columns)
    assert run == CopyRuns(116, 7, length=16, count=4096, source_stride=64, target_stride=16)


def test_whole_rows_are_one_single_run():
    whole, rows = Box((0, 0), (8, 4)), Box((2, 0), (6, 4))
    assert runs_between(whole, 0, rows, 50, rows) == [CopyRuns(8, 50, 16)]


def test_a_block_of_a_cube_that_is_narrow_twice_needs_one_entry_for_every_outer_index():
    cube, block = Box((0, 0, 0), (2, 4, 4)), Box((0, 1, 1), (2, 3, 3))
    assert runs_between(cube, 0, block, 0, block) == [
        CopyRuns(5, 0, 2, count=2, source_stride=4, target_stride=2),
        CopyRuns(21, 4, 2, count=2, source_stride=4, target_stride=2),
    ]


def test_one_column_is_runs_of_one_element():
    whole, column = Box((0, 0), (5, 3)), Box((0, 2), (5, 3))
    assert runs_between(whole, 0, column, 0, column) == [CopyRuns(2, 0, 1, count=5, source_stride=3, target_stride=1)]


def test_neighbours_become_one_run_and_equal_steps_are_folded():
    neighbours = [CopyRuns(10, 0, 4), CopyRuns(14, 4, 6)]
    assert join_runs(neighbours[::-1]) == (CopyRuns(10, 0, 10),)
    steps = [CopyRuns(10 * index, 100 + 5 * index, 3) for index in range(7)]
    assert join_runs(steps) == (CopyRuns(0, 100, 3, count=7, source_stride=10, target_stride=5),)


def test_runs_that_step_backwards_or_on_the_spot_are_left_alone():
    backwards = (CopyRuns(20, 0, 3), CopyRuns(10, 5, 3))
    assert join_runs(backwards) == backwards
    on_the_spot = (CopyRuns(20, 0, 3), CopyRuns(22, 5, 3))
    assert join_runs(on_the_spot) == on_the_spot


@st.composite
def nested_boxes(draw):
    """(source box, target box, what both hold), 1 to 4 dims."""
    dims = draw(st.integers(1, 4))
    common = [(low, low + draw(st.integers(1, 3))) for low in (draw(st.integers(0, 3)) for _ in range(dims))]

    def around():
        ends = [(draw(st.integers(0, low)), high + draw(st.integers(0, 2))) for low, high in common]
        return Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))

    return around(), around()


@given(nested_boxes(), st.integers(0, 9), st.integers(0, 9))
def test_runs_copy_exactly_the_common_elements(boxes, source_offset, target_offset):
    source, target = boxes
    common = source.intersect(target)
    assert common
    ids = np.arange(10**4).reshape(10, 10, 10, 10)[(0,) * (4 - len(source.start))]
    held = np.full(source_offset + source.numel, -1)
    held[source_offset:] = ids[tuple(map(slice, source.start, source.stop))].reshape(-1)
    expected = np.full(target.shape, -1)
    inside = tuple(
        slice(low - at, high - at) for low, high, at in zip(common.start, common.stop, target.start, strict=True)
    )
    expected[inside] = ids[tuple(map(slice, common.start, common.stop))]
    runs = runs_between(source, source_offset, target, target_offset, common)
    for form in (runs, join_runs(runs)):
        got = np.full(target_offset + target.numel, -1)
        for run in form:
            for begin, to, length in run.each():
                got[to : to + length] = held[begin : begin + length]
        assert np.array_equal(got[target_offset:], expected.reshape(-1))
        assert sum(run.elements for run in form) == common.numel


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=30
    )
)
def test_joining_keeps_every_copied_element(rows):
    runs, position = [], 0
    for source, length, gap, count in rows:
        stride = length + gap if count > 1 else 0
        run = CopyRuns(source, position, length, count, stride, stride)
        runs.append(run)
        position = run.target_stop + gap

    def copies(form):
        return sorted((t + i, s + i) for run in form for s, t, length in run.each() for i in range(length))

    joined = join_runs(runs)
    assert copies(joined) == copies(runs)
    assert len(joined) <= len(runs)


@pytest.mark.parametrize(
    "numbers",
    [
        (-1, 0, 1),
        (0, -1, 1),
        (0, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 4, 2, 3, 4),
        (0, 0, 4, 2, 4, 3),
        (0, 0, 4, 1, 4, 0),
        (0, 0, 4, 1, 0, 4),
    ],
)
def test_impossible_runs_are_refused(numbers):
    with pytest.raises(PlanError):
        CopyRuns(*numbers)
