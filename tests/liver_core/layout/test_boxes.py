"""Boxes, and the fall of flat ranges into at most 2n-1 of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.layout import Box, LayoutError, flat_range_to_boxes

tensor_shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(tensor_shapes)
    numel = int(np.prod(shape))
    start = draw(st.integers(0, numel - 1))
    return shape, start, draw(st.integers(start + 1, numel))


@given(ranges())
def test_a_flat_range_is_at_most_2n_minus_1_boxes_that_give_it_back_in_order(case):
    shape, start, stop = case
    boxes = flat_range_to_boxes(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    ids = np.arange(np.prod(shape)).reshape(shape)
    flat = [ids[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))].reshape(-1) for box in boxes]
    assert np.concatenate(flat).tolist() == list(range(start, stop))


def test_the_worst_range_of_a_cube_needs_all_five_boxes():
    boxes = flat_range_to_boxes((3, 3, 3), 1, 26)
    assert [str(box) for box in boxes] == [
        "[0:1, 0:1, 1:3]",
        "[0:1, 1:3, 0:3]",
        "[1:2, 0:3, 0:3]",
        "[2:3, 0:2, 0:3]",
        "[2:3, 2:3, 0:2]",
    ]


def test_whole_rows_are_one_box():
    assert flat_range_to_boxes((8, 4), 8, 24) == (Box((2, 0), (6, 4)),)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (-1, 3), (5, 13), (7, 6)])
def test_a_range_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(LayoutError, match="12 elements"):
        flat_range_to_boxes((3, 4), start, stop)


@st.composite
def box_pairs(draw):
    dims = draw(st.integers(1, 3))

    def one():
        start = [draw(st.integers(0, 5)) for _ in range(dims)]
        return Box(tuple(start), tuple(low + draw(st.integers(1, 4)) for low in start))

    return one(), one()


@given(box_pairs())
def test_an_intersection_holds_exactly_what_both_hold(pair):
    def points(box):
        return {tuple(low + by for low, by in zip(box.start, index, strict=True)) for index in np.ndindex(*box.shape)}

    first, second = pair
    common = first.intersect(second)
    assert (points(common) if common else set()) == points(first) & points(second)
    assert common == second.intersect(first)


def test_a_box_has_a_shape_and_a_text():
    box = Box((1, 2), (3, 4))
    assert (box.shape, box.numel, str(box)) == ((2, 2), 4, "[1:3, 2:4]")


@pytest.mark.parametrize(
    ("start", "stop", "rule"),
    [
        ((1, 2), (3, 2), "0 <= start < stop"), ((1, 3), (3, 2), "0 <= start < stop"), ((-1,), (3,), "0 <= start"),
        ((0,), (3, 2), "same dims"), ((), (), "at least one"),
    ],
)  # fmt: skip
def test_a_box_that_is_empty_negative_or_without_dims_is_refused(start, stop, rule):
    with pytest.raises(LayoutError, match=r"^box: ") as error:
        Box(start, stop)
    assert rule in str(error.value)


def test_a_shifted_box_moves_along_one_dim_only():
    box = Box((1, 2), (3, 4))
    assert box.shift(1, 5) == Box((1, 7), (3, 9)) and box == Box((1, 2), (3, 4))
