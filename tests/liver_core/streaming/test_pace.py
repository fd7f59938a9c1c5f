"""How often a follower looks: seldom while nothing can be new, and never later than a part of a step."""

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
    assert found[-1] - step_s <= max(LEAST, min(step_s / 12, 0.03)) + 1e-9
    if step_s <= 0.3:
        assert len(found) <= 8


@pytest.mark.parametrize("step_s", [0.003, 0.05, 0.3])
def test_the_first_step_of_which_nothing_is_known_is_seen_within_a_third_of_it(step_s):
    found = looks(Pace(), step_s)
    assert found[-1] <= step_s * 4 / 3 + LEAST
    assert len(found) <= 30


def test_a_follower_that_lacks_a_tile_does_not_sleep_half_a_step():
    pace = Pace(step_s=0.3)
    assert pace.sleep(LEAST, idle=False) == pytest.approx(0.025)
