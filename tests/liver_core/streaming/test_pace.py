"""How often a follower looks: seldom while nothing can be new, and never later than a part of a step. And how long it
takes to have everything."""

from math import inf

import pytest

from liver_core.streaming.pace import Pace

LEAST = 0.001


def looks(pace: Pace, seconds: float) -> list[float]:
    """When an idle follower looks during the seconds after a replay."""
    pace.replayed(0.01, 100)
    at, found = 0.0, []
    while at < seconds:
        at += pace.sleep(LEAST, idle=True)
        found.append(at)
    return found


@pytest.mark.parametrize("step_s", [0.002, 0.05, 0.3, 2.0, 60.0])
def test_a_step_that_takes_its_usual_time_is_seen_soon_and_with_few_looks(step_s):
    found = looks(Pace(step_s=step_s), step_s)
    assert found[-1] - step_s <= max(LEAST, min(step_s / 12, 0.25)) + 1e-9
    if step_s <= 2.0:
        assert len(found) <= 8


@pytest.mark.parametrize("step_s", [0.003, 0.05, 0.3])
def test_the_first_step_of_which_nothing_is_known_is_seen_within_a_third_of_it(step_s):
    found = looks(Pace(), step_s)
    assert found[-1] <= step_s * 4 / 3 + LEAST
    assert len(found) <= 30


def test_a_follower_that_lacks_a_tile_does_not_sleep_half_a_step():
    pace = Pace(step_s=0.3)
    assert pace.sleep(LEAST, idle=False) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("step_s", "slept_s", "idle", "seconds"),
    [
        (0.0, 0.06, True, 0.02), (0.0, 0.0, True, LEAST), (0.0, 9.0, True, 0.03),
        (0.3, 0.0, True, 0.15), (60.0, 0.0, True, 1.0), (0.3, 0.1, True, 0.025), (60.0, 0.1, True, 0.25),
        (0.3, 0.0, False, 0.025), (60.0, 0.0, False, 0.03), (0.001, 0.0, True, LEAST),
    ],
)  # fmt: skip
def test_each_sleep_is_a_part_of_the_step_within_its_bounds_and_is_added_up(step_s, slept_s, idle, seconds):
    pace = Pace(step_s=step_s, slept_s=slept_s)
    assert pace.sleep(LEAST, idle=idle) == pytest.approx(seconds)
    assert pace.slept_s == pytest.approx(slept_s + seconds)
    pace.replayed(1.0, 1)
    assert pace.slept_s == 0.0


def test_speeds_are_smoothed_from_their_first_measure_on():
    pace = Pace()
    for measured in (pace.copied, pace.fetched, pace.replayed):
        measured(2.0, 4)
        measured(3.0, 2)
    assert (pace.copy_s, pace.fetch_s, pace.replay_s) == (pytest.approx(0.7 * 0.5 + 0.3 * 1.5),) * 3
    pace.copied(7.0, 0)
    assert pace.copy_s == pytest.approx(0.7 * 0.8 + 0.3 * 7.0), "nothing takes time as one element does"
    assert str(Pace(copy_s=2e-9, fetch_s=1e-9, step_s=0.25)) == (
        "copy 2 ns, fetch 1 ns, replay 0 ns an element, step 0.25 s"
    )


def played(pace: Pace, todo: int, elements: int) -> float:
    """What `estimate` solves, in small steps of time: who replays what is here copies in the rest of the time."""
    assert pace.copy_s is not None and pace.replay_s is not None
    here, at_s, tick_s = float(elements - todo), 0.0, 0.001
    while here < elements:
        replays = (pace.replay_s + pace.fetch_s) * here / pace.step_s
        here += tick_s * (1 - replays) / pace.copy_s
        at_s += tick_s
    return at_s


@pytest.mark.parametrize(("todo", "fetch_s"), [(100, 0.0), (100, 0.02), (40, 0.02), (1, 0.03)])
def test_the_estimate_is_the_time_that_copying_takes_beside_the_replays(todo: int, fetch_s: float):
    pace = Pace(copy_s=0.1, fetch_s=fetch_s, replay_s=0.03, step_s=8.0)
    assert pace.estimate(todo, 100) == pytest.approx(played(pace, todo, 100), rel=0.01)


def test_the_estimate_is_that_of_copying_alone_while_replays_or_steps_are_not_known():
    assert Pace().estimate(0, 10) == 0.0
    assert Pace().estimate(5, 10) is None
    assert Pace(copy_s=0.5).estimate(4, 10) == pytest.approx(2.0)
    assert Pace(copy_s=0.5, replay_s=9.0).estimate(4, 10) == pytest.approx(2.0)
    assert Pace(copy_s=0.5, step_s=9.0).estimate(4, 10) == pytest.approx(2.0)
    assert Pace(copy_s=0.5, replay_s=1e-15, step_s=9.0).estimate(4, 10) == pytest.approx(2.0)


def test_there_is_no_end_where_replays_take_all_the_time():
    assert Pace(copy_s=0.5, replay_s=0.5, fetch_s=0.5, step_s=10.0).estimate(4, 10) == inf
    barely = Pace(copy_s=0.5, replay_s=0.5, fetch_s=0.5, step_s=10.1).estimate(4, 10)
    assert barely is not None and barely < 1000
