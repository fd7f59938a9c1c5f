"""Numbers of generations: service and agents never take the same one, whatever either has heard of the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.handoff.generations import PLACES, next_handoff, next_start, start_of

STEPS = st.lists(st.tuples(st.sampled_from(["start", "handoff", "agents hear", "service hears"])), max_size=60)


@given(STEPS)
def test_no_number_is_used_twice(steps: list[tuple[str]]):
    """`service` and `agents`: the highest number that each knows. The service hears of its own starts at once; agents
    hear of a start, or of nothing, and hand over from what they know."""
    service, agents, used = 1, 1, [1]
    for (step,) in steps:
        match step:
            case "start":
                service = next_start(service)
                used.append(service)
            case "handoff":
                following = next_handoff(agents)
                assert following is not None
                agents = following
                used.append(agents)
            case "agents hear":
                agents = max(agents, service)
            case _:
                service = max(service, agents)
    assert len(used) == len(set(used))


@given(st.integers(min_value=0, max_value=2**40))
def test_a_start_is_above_every_handoff_before_it(highest: int):
    started = next_start(highest)
    assert started > highest
    assert next_handoff(started) == started + 1
    assert highest == 0 or start_of(started) == start_of(highest) + 1


def test_the_first_world_is_generation_1_and_its_handoffs_count_on():
    assert next_start(0) == 1
    assert next_handoff(1) == 2


@pytest.mark.parametrize("highest", [PLACES - 1, 3 * PLACES - 1])
def test_a_start_runs_out_of_numbers_and_takes_none_of_the_next(highest: int):
    assert next_handoff(highest - 1) == highest
    assert next_handoff(highest) is None
    assert next_start(highest) == highest + 2
