"""NaN is the same as NaN, wherever in a value it is; all else is compared as ever."""

import math
from typing import Any

import pytest

from liver_core.same_value import same_number, same_value

NAN = math.nan


@pytest.mark.parametrize(
    "value",
    [NAN, {"best": NAN}, {"a": [1, (NAN, {"b": NAN})]}, (NAN, NAN), [], {}, "text", None, 1.5, True],
    ids=repr,
)
def test_a_value_is_the_same_as_its_copy_with_another_nan(value: Any):
    assert same_value(value, _copied(value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (NAN, 0.0),
        (NAN, None),
        ({"a": NAN}, {"b": NAN}),
        ({"a": NAN}, {"a": NAN, "b": 1}),
        ([NAN], [NAN, NAN]),
        ([NAN], (NAN,)),
        ({"a": [NAN, 1]}, {"a": [NAN, 2]}),
        ({1: 0}, {"1": 0}),
    ],
)
def test_values_that_differ_are_not_the_same(one: Any, other: Any):
    assert not same_value(one, other) and not same_value(other, one)


def test_numbers_are_the_same_if_they_are_equal_or_both_nan():
    assert same_number(NAN, float("nan")) and same_number(0.0, -0.0) and same_number(math.inf, math.inf)
    assert not same_number(NAN, math.inf) and not same_number(1.0, 2.0)


def _copied(value: Any) -> Any:
    """Equal in all but that each NaN is another object."""
    match value:
        case dict():
            return {key: _copied(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_copied(each) for each in value)
        case float():
            return float(repr(value))
    return value
