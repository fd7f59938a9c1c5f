"""How long starts of a job take, and what follows from that."""

from datetime import UTC, datetime, timedelta

import pytest

from service.handoffs.start_times import StartLeft, Starts, next_start_at, start_left, starts_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_the_usual_start_is_the_median_of_those_that_made_a_step_and_the_newest_ones_without_are_counted():
    assert starts_of([]) == Starts(None, 0)
    assert starts_of([("init", at(9), None), ("init", at(0), None)]) == Starts(None, 2)
    times = [(at(400), None), (at(300), None), (at(200), at(240)), (at(150), None), (at(100), at(130)), (at(0), at(90))]
    found = [("checkpoint", *each) for each in times]
    assert starts_of(found) == Starts(40.0, 2)
    assert starts_of(iter(found[2:])) == Starts(40.0, 0)


def test_how_long_a_start_takes_is_seen_by_those_that_begin_with_the_same():
    first = ("init", at(0), at(5))
    assert starts_of([("checkpoint", at(100), None), first]) == Starts(None, 1)
    assert starts_of([("checkpoint", at(200), None), ("checkpoint", at(100), at(160)), first]) == Starts(60.0, 1)


@pytest.mark.parametrize(("stepless", "waits_s"), [(0, 0), (2, 0), (3, 10), (4, 20), (6, 80), (7, 120), (9_999, 120)])
def test_the_first_starts_follow_at_once_and_then_it_takes_ever_longer(stepless, waits_s):
    assert next_start_at(Starts(None, stepless), NOW, starts_max=3) == at(waits_s)


def test_a_start_is_lost_if_its_node_goes_before_the_step_after_the_first():
    left = start_left(at(10), at(0), at(49), usual_s=40.0, step_s=9.0)
    assert left == StartLeft(to_step_s=30.0, step_s=9.0, to_end_s=39.0)
    assert left.is_lost and not start_left(at(10), at(0), at(49), usual_s=40.0, step_s=8.5).is_lost


def test_of_a_start_that_takes_longer_than_usual_only_a_step_is_asked_for():
    late = start_left(at(60), at(0), at(70), usual_s=40.0, step_s=4.0)
    assert (late.to_step_s, late.is_lost, late.is_lost_in_s) == (0.0, False, 6.0)
    assert start_left(at(66), at(0), at(70), usual_s=40.0, step_s=4.0).is_lost


def test_a_start_makes_no_step_before_it_may():
    assert start_left(at(0), at(0), at(90), usual_s=40.0, step_s=0.0, steps_from_at=at(55)).to_step_s == 55.0
    assert start_left(at(0), at(0), at(90), usual_s=40.0, step_s=0.0, steps_from_at=at(5)).to_step_s == 40.0
