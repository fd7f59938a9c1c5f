"""How far a node's clock is off, and that what it names as a time means the same moment to the service."""

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.nodes.skew import CONFIRM_S, EXACT_S, STEADY_S, WAY_S_MAX, Skew, measured, off_by

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def after(known: Skew | None, *, at_s: float, ahead_s: float, way_s: float) -> Skew:
    arrived = NOON + timedelta(seconds=at_s)
    return measured(known, issued=arrived + timedelta(seconds=ahead_s - way_s), arrived=arrived)


def test_the_report_that_came_fastest_counts():
    skew = None
    for second, way_s in enumerate((2.0, 0.01, 8.0, 3.0, 0.2)):
        skew = after(skew, at_s=second, ahead_s=-300.0, way_s=way_s)
    assert skew is not None and skew.ahead_s == pytest.approx(-300.01)


def test_small_changes_are_none_so_that_times_stay_where_they_were_moved_to():
    skew = after(None, at_s=0, ahead_s=60.0, way_s=0.1)
    for second in range(1, 200):
        skew = after(skew, at_s=second, ahead_s=60.0, way_s=0.1 + STEADY_S * (second % 3 - 1) * 0.9)
        assert skew.ahead_s == pytest.approx(59.9)


@pytest.mark.parametrize("to_s", [0.0, 300.0, -300.0])
def test_a_clock_that_was_set_is_known_at_once(to_s):
    skew = after(None, at_s=0, ahead_s=-60.0 if to_s > -60 else 60.0, way_s=0.0)
    assert after(skew, at_s=1, ahead_s=to_s, way_s=0.0).ahead_s == to_s


def test_a_clock_that_was_put_back_by_less_than_a_report_may_take_is_known_after_a_while():
    skew = after(None, at_s=0, ahead_s=0.0, way_s=0.0)
    for second in range(1, int(CONFIRM_S) + 1):
        skew = after(skew, at_s=second, ahead_s=-WAY_S_MAX / 2, way_s=0.0)
        assert skew.ahead_s == 0.0, "the reports may be slow"
    assert after(skew, at_s=CONFIRM_S + 1, ahead_s=-WAY_S_MAX / 2, way_s=0.0).ahead_s == -WAY_S_MAX / 2


def told(known: Skew | None, *, at_s: float, ahead_s: float, ways_s: tuple[float, float], ago_s: float = 1.0) -> Skew:
    """As `after`, by a report that names the answer before it. `ways_s`: of the answer, and of the report."""
    answered = NOON + timedelta(seconds=at_s)
    issued = answered + timedelta(seconds=ways_s[0] + ago_s + ahead_s)
    arrived = answered + timedelta(seconds=ways_s[0] + ago_s + ways_s[1])
    return measured(known, issued=issued, arrived=arrived, answered=answered, ago_s=ago_s)


ways = st.floats(0, 600, allow_nan=False)


@given(st.floats(-400, 400), st.lists(st.tuples(ways, ways), min_size=1, max_size=8))
def test_the_clock_of_a_node_is_never_believed_to_be_off_by_more_than_a_report_proves(ahead_s, all_ways):
    """Whatever ways took: nobody that is right is moved, and what is known is wrong by one of its ways at most."""
    skew, least_s = None, math.inf
    for number, ways_s in enumerate(all_ways):
        skew = told(skew, at_s=10.0 * number, ahead_s=ahead_s, ways_s=ways_s)
        least_s = min(least_s, max(ways_s))
        assert min(0.0, ahead_s) - STEADY_S - 1e-3 <= skew.ahead_s <= max(0.0, ahead_s) + STEADY_S + 1e-3
        assert abs(skew.ahead_s - ahead_s) <= least_s + STEADY_S + 1e-3


def test_while_everything_is_slow_no_time_moves_and_so_no_notice_becomes_another():
    right, behind = (
        told(None, at_s=0, ahead_s=0, ways_s=(0.01, 0.01)),
        told(None, at_s=0, ahead_s=-60, ways_s=(0.0, 0.0)),
    )
    for second in range(1, 200):
        ways_s = (second * 7 % 13 * 1.0, second * 5 % 11 * 1.0)
        right, behind = (
            told(known, at_s=second, ahead_s=ahead_s, ways_s=ways_s) for known, ahead_s in ((right, 0), (behind, -60))
        )
        assert off_by(right.ahead_s) == timedelta(0) and behind.ahead_s == -60.0


@pytest.mark.parametrize("to_s", [0.0, 5.0, -5.0, 300.0, -300.0])
def test_a_clock_that_was_set_between_answer_and_report_is_known_with_the_next(to_s):
    skew = told(None, at_s=0, ahead_s=2.0, ways_s=(0.0, 0.0))
    issued = NOON + timedelta(seconds=11 + to_s)
    arrived, answered = NOON + timedelta(seconds=11), NOON + timedelta(seconds=10)
    skew = measured(skew, issued=issued, arrived=arrived, answered=answered, ago_s=1.0)
    assert told(skew, at_s=20, ahead_s=to_s, ways_s=(0.0, 0.0)).ahead_s == pytest.approx(to_s)


def test_times_of_a_clock_that_is_about_right_are_not_moved():
    assert off_by(None) == off_by(EXACT_S) == off_by(-EXACT_S) == timedelta(0)
    assert off_by(-300.5) == timedelta(seconds=-300.5)
