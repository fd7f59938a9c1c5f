"""Numbers of generations: service and agents never take the same one, whatever either has heard of the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.handoff.generations import (
    PLACES,
    STARTS_AHEAD_MAX,
    StartWait,
    last_after,
    may_replace,
    next_handoff,
    next_number,
    next_start,
    start_of,
    start_wait,
    unfenced,
)
from liver_core.layout import Member
from liver_core.layout.limits import GENERATION_MAX

STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "handoff", "agents hear", "agents fence", "agents switch", "service hears"])),
    max_size=60,
)


@given(STEPS)
def test_no_number_is_used_twice(steps: list[tuple[str]]):
    """`service` and `agents`: the highest number that each knows. The service hears of its own starts at once; agents
    hear of a start, or only that all numbers before it are used up, or of nothing. They hand over from `parent`, the
    newest world that they stepped in."""
    service, agents, parent, newest_start, used = 1, 1, 1, 1, [1]
    for (step,) in steps:
        match step:
            case "start":
                service = newest_start = next_start(service)
                used.append(service)
            case "handoff":
                following = next_handoff(agents, parent)
                if start_of(agents) > start_of(parent):
                    assert following is None
                else:
                    assert following is not None
                    parent = agents = following
                    used.append(agents)
            case "agents hear":
                agents = max(agents, service)
            case "agents fence":
                agents = max(agents, newest_start - 1)
            case "agents switch":
                agents = parent = max(agents, newest_start)
            case _:
                service = max(service, agents)
    assert len(used) == len(set(used))


@given(st.integers(min_value=0, max_value=2**40))
def test_a_start_is_above_every_handoff_before_it(highest: int):
    started = next_start(highest)
    assert started > highest
    assert next_handoff(started, started) == started + 1
    assert highest == 0 or start_of(started) == start_of(highest) + 1


def test_the_first_world_is_generation_1_and_its_handoffs_count_on():
    assert next_start(0) == 1
    assert next_handoff(1, 1) == 2


@pytest.mark.parametrize("highest", [PLACES - 1, 3 * PLACES - 1])
def test_a_start_runs_out_of_numbers_and_takes_none_of_the_next(highest: int):
    assert next_handoff(highest - 1, highest - 1) == highest
    assert next_handoff(highest, highest - 1) is None
    assert next_start(highest) == highest + 2


def test_a_start_that_replaces_another_has_a_number_that_the_service_can_have_reached():
    last = 1 + (2 + STARTS_AHEAD_MAX) * PLACES
    assert last_after(2 * PLACES + 7) == last
    for newer in (3 * PLACES + 1, last):
        assert may_replace(newer, 2 * PLACES + 7)
    for other in (1, 2 * PLACES + 1, 3 * PLACES, 3 * PLACES + 2, last + PLACES, GENERATION_MAX):
        assert not may_replace(other, 2 * PLACES + 7)


@pytest.mark.parametrize("heard", [PLACES, PLACES + 1, PLACES + 7])
def test_a_world_of_which_a_newer_start_was_heard_has_no_next_handoff(heard: int):
    """At the first place the start itself was not heard of, only that all numbers before it are used up."""
    assert next_handoff(heard, 5) is None


A, B, C, D = (Member(name, 0) for name in "abcd")


def test_a_handoff_takes_the_number_after_the_highest_and_none_where_a_newer_start_is_known():
    assert [next_number(*known) for known in ((1, 1), (4, 1), (7, 1), (1, 6))] == [2, 5, 8, 7]
    assert next_number(1, 200_003) == 200_004
    assert next_number(4, 1, place=2) == 7, "two others may open one as well"
    assert next_number(100_001, 3) == "no handoff of generation 3: the service has started generation 100001"
    assert next_number(99_999, 3) == "no handoff of generation 3: its start has no number left"


@pytest.mark.parametrize(
    ("worlds", "target", "leased", "waits"),
    [
        ([(A, B)], (C, D), "ab", "ab"),
        ([(A, B)], (C, D), "b", "b"),
        ([(A, B)], (C, D), "cd", ""),
        ([(A, B)], (B, C), "ab", ""),
        ([(A, B), (C,)], (B, D), "abc", "c"),
        ([], (A,), "abcd", ""),
    ],
    ids=["all", "one", "no lease", "one member starts anew", "the next world of a handoff", "no world"],
)
def test_a_start_waits_for_the_leases_of_worlds_that_none_of_its_own_ranks_will_have_ended(
    worlds: list[tuple[Member, ...]], target: tuple[Member, ...], leased: str, waits: str
):
    assert "".join(unfenced(worlds, target=target, leased=leased)) == waits


@pytest.mark.parametrize(
    ("lost_sight_of", "waits"),
    [
        ({}, StartWait((), 14.0)),
        ({"a": 3.0}, StartWait(("a",), 14.0)),
        ({"a": 3.0, "b": 13.9}, StartWait(("a", "b"), 0.0)),
        ({"a": 14.0, "b": 30.0}, StartWait((), 0.0)),
        ({"a": 14.0}, StartWait((), 14.0)),
        ({"d": 3.0}, StartWait((), 14.0)),
    ],
    ids=["both are heard", "one is", "none is", "their leases are over", "of one they are", "it is a target"],
)
def test_a_start_waits_for_leases_of_nodes_that_are_not_heard_and_its_ranks_for_those_of_nodes_that_are(
    lost_sight_of: dict[str, float], waits: StartWait
):
    assert start_wait([(A, B)], target=(C, D), lost_sight_of=lost_sight_of.items(), lease_s=14.0) == waits


def test_a_start_on_a_member_of_the_older_world_waits_for_nothing():
    assert start_wait([(A, B)], target=(B, C), lost_sight_of=[("a", 1.0)], lease_s=14.0) == StartWait((), 0.0)
