"""When a suspension that can wait has to begin."""

from datetime import UTC, datetime, timedelta

import pytest

from liver_core.handoff.suspending import EARLIER_S, LATER_S, SAVE_GUESS_S, TAKES_S, EndTimes, begins_at

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PACE = EndTimes(step_s=0.5, save_s=2.0)
NEEDS_S = TAKES_S + 3 * 0.5 + 2 * 2.0


def at(after_s: float) -> datetime:
    return NOW + timedelta(seconds=after_s)


def test_it_is_over_before_the_first_node_goes() -> None:
    assert PACE.suspends_in_s == NEEDS_S
    assert begins_at((at(120), at(60)), PACE, None) == at(60 - NEEDS_S)
    assert begins_at((at(1),), PACE, None) == at(1 - NEEDS_S), "it should have begun"


def test_a_checkpoint_of_unknown_length_is_given_time_enough() -> None:
    assert begins_at((at(120),), EndTimes(0.5, None), None) == at(120 - TAKES_S - 3 * 0.5 - 2 * SAVE_GUESS_S)


@pytest.mark.parametrize(
    ("deadlines", "times"),
    [((), PACE), ((at(60), None), PACE), ((at(60),), EndTimes(0.0, 2.0))],
    ids=["nobody goes", "one may go at any time", "no step was timed"],
)
def test_it_begins_at_once_where_nobody_can_say_how_long_there_is(
    deadlines: tuple[datetime | None, ...], times: EndTimes
) -> None:
    assert begins_at(deadlines, times, at(10)) is None


@pytest.mark.parametrize(
    ("moved_s", "stays"),
    [(-EARLIER_S - 0.1, False), (-EARLIER_S, True), (0.0, True), (LATER_S, True), (LATER_S + 0.1, False)],
)
def test_a_time_that_was_told_stays_unless_it_is_too_late_or_much_too_early(moved_s: float, stays: bool) -> None:
    told = at(60 - NEEDS_S)
    assert begins_at((at(60 + moved_s),), PACE, told) == (told if stays else at(60 + moved_s - NEEDS_S))
