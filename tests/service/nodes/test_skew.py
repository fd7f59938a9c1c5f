"""How far a node's clock is off, and that what it names as a time means the same moment to the service."""

from datetime import UTC, datetime, timedelta

import pytest

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


def test_times_of_a_clock_that_is_about_right_are_not_moved():
    assert off_by(None) == off_by(EXACT_S) == off_by(-EXACT_S) == timedelta(0)
    assert off_by(-300.5) == timedelta(seconds=-300.5)
