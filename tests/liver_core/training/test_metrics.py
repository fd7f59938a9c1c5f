"""What a job may report of its own, and how it learns what is wrong."""

import math

import pytest

from liver_core.training.metrics import NAMES_MAX, ReportedMetrics, checked_metrics


def test_numbers_of_any_kind_are_floats_and_what_is_not_finite_is_none():
    found = checked_metrics({"a": 1, "own/b": True, "c.d-e_f": 0.5, "nan": math.nan, "inf": -math.inf})
    assert found == {"a": 1.0, "own/b": 1.0, "c.d-e_f": 0.5, "nan": None, "inf": None}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ([1.0], "values must be a dict of names and numbers, is list"),
        ({"": 1.0}, "the name '' must be 1 to 64 letters"),
        ({"x" * 65: 1.0}, "must be 1 to 64 letters"),
        ({"two words": 1.0}, "the name 'two words' must be"),
        ({"line\n": 1.0}, "must be 1 to 64 letters"),
        ({7: 1.0}, "the name 7 must be"),
        ({"loss": 1.0}, "the name 'loss' is taken"),
        ({"a": "1.0"}, "a must be a number, or a tensor of one, is '1.0'"),
        ({"a": None}, "a must be a number"),
        ({"a": [1.0]}, "a must be a number"),
        ({"a": 10**400}, "a must be a number"),
    ],
)
def test_what_breaks_a_rule_is_named(values, rule):
    with pytest.raises(ValueError, match=r"^report: ") as error:
        checked_metrics(values)
    assert rule in str(error.value)


def test_a_step_has_what_its_hooks_reported_and_the_last_value_counts():
    reported = ReportedMetrics()
    reported.open(3)
    reported.take(3, {"a": 1.0, "b": None})
    reported.take(3, {"a": 2.0})
    assert reported.close() == {"a": 2.0, "b": None}
    reported.open(4)
    assert reported.close() == {}


def test_only_the_step_of_the_hook_can_be_reported_and_only_there():
    reported = ReportedMetrics()
    with pytest.raises(ValueError, match="call it in on_step or validate"):
        reported.take(1, {"a": 1.0})
    reported.open(3)
    with pytest.raises(ValueError, match="step must be that of the hook, 3, is 2"):
        reported.take(2, {"a": 1.0})
    reported.close()
    with pytest.raises(ValueError, match="not outside of these hooks"):
        reported.take(3, {"a": 1.0})


def test_the_number_of_names_is_bounded_in_a_step_and_in_all():
    reported = ReportedMetrics()
    reported.open(1)
    with pytest.raises(ValueError, match="step 1 has 65 names, at most 64 in a step"):
        reported.take(1, {f"n{number}": 1.0 for number in range(65)})
    for step in range(NAMES_MAX // 64):
        reported.open(step)
        reported.take(step, {f"n{step}-{number}": 1.0 for number in range(64)})
    reported.open(99)
    reported.take(99, {"n0-1": 1.0})
    with pytest.raises(ValueError, match="there are 257 different names by now, at most 256"):
        reported.take(99, {"one-more": 1.0})
