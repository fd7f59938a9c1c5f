"""Which of two copies of a handoff is the newer truth, and what it is for."""

import itertools
from datetime import UTC, datetime

import pytest

from agent.protocol.values import HandoffCause, HandoffState, Placement
from liver_core.layout import Member, ParallelLayout
from service.handoffs.rules import Copy, Declined, is_newer, is_open, is_opened_anew, orders_differ, why_opened
from tests.service.fake_agent import mirror, roster


def test_an_end_beats_what_is_open_whatever_the_sequence():
    assert is_newer(Copy(HandoffState.ABORTED, 1, 0, 7), Copy(HandoffState.READY, 3, 99, 7))
    assert not is_newer(Copy(HandoffState.READY, 3, 99, 7), Copy(HandoffState.ABORTED, 1, 0, 7))


def test_active_beats_aborted_and_broken_beats_both():
    assert is_newer(Copy(HandoffState.ACTIVE, 1, 0, 7), Copy(HandoffState.ABORTED, 2, 9, 7))
    assert is_newer(Copy(HandoffState.BROKEN, 1, 0, 7), Copy(HandoffState.ACTIVE, 1, 9, 7))


def test_an_amended_plan_is_newer_although_it_prepares_again():
    assert is_newer(Copy(HandoffState.PREPARING, 2, 5), Copy(HandoffState.READY, 1, 9))


def test_at_the_same_place_the_sequence_decides():
    assert is_newer(Copy(HandoffState.READY, 1, 6), Copy(HandoffState.READY, 1, 5))
    assert not is_newer(Copy(HandoffState.READY, 1, 5), Copy(HandoffState.READY, 1, 5))


def test_of_two_different_copies_exactly_one_is_newer():
    places = itertools.product(HandoffState, (1, 2), (0, 1), (7, 8))
    for one, other in itertools.combinations([Copy(*place) for place in places], 2):
        same_end = not is_open(one.state) and one.state is other.state and one.mirror_seq == other.mirror_seq
        if same_end and (one.state is not HandoffState.ABORTED or one.generation == other.generation):
            continue
        assert is_newer(one, other) != is_newer(other, one)


def test_a_handoff_that_was_dropped_before_it_had_a_number_is_opened_anew_only_by_a_copy_made_later():
    """An older copy, that a peer passes on late, is not the news of an agent that drives it on."""
    dropped = Copy(HandoffState.ABORTED, 1, 4)
    assert is_opened_anew(Copy(HandoffState.READY, 1, 5, 7), dropped)
    for state in (HandoffState.PREPARING, HandoffState.READY, HandoffState.ABORTED):
        assert is_newer(Copy(state, 1, 5, 7), dropped)
        assert not is_newer(Copy(state, 1, 3, 7), dropped)
        assert not is_newer(Copy(state, 1, 4, 7), dropped)
    assert not is_newer(Copy(HandoffState.READY, 1, 5, 7), Copy(HandoffState.ABORTED, 1, 4, 7))


def test_a_handoff_that_one_agent_aborted_and_another_opened_again_is_as_the_later_number_tells():
    """An agent opens a proposal and goes down, another opens it, and the first one tells that it had given it up."""
    aborted, opened = Copy(HandoffState.ABORTED, 3, 30, 7), Copy(HandoffState.PREPARING, 1, 0, 8)
    assert is_newer(opened, aborted) and is_opened_anew(opened, aborted) and not is_newer(aborted, opened)
    assert is_newer(Copy(HandoffState.PREPARING, 1, 0, 8), Copy(HandoffState.READY, 3, 30, 7))
    assert is_newer(Copy(HandoffState.ABORTED, 1, 0, 8), aborted)
    assert orders_differ(opened, Copy(HandoffState.PREPARING, 1, 0, 7))
    for end in (HandoffState.ACTIVE, HandoffState.BROKEN):
        over = Copy(end, 1, 0, 7)
        assert is_newer(over, opened) and not is_newer(opened, over), "the job has gone on, or is lost, whatever opens"
        assert not is_opened_anew(opened, over)


def test_nodes_are_told_of_new_handoffs_new_plans_and_ends_and_of_nothing_between():
    ready = Copy(HandoffState.READY, 1, 5)
    assert orders_differ(ready, None)
    assert orders_differ(Copy(HandoffState.PREPARING, 2, 6), ready)
    assert orders_differ(Copy(HandoffState.ACTIVE, 1, 6), ready)
    assert orders_differ(Copy(HandoffState.ACTIVE, 1, 6), Copy(HandoffState.ABORTED, 1, 5))
    assert not orders_differ(Copy(HandoffState.CUTTING_OVER, 1, 6), ready)
    assert not orders_differ(Copy(HandoffState.ACTIVE, 1, 7), Copy(HandoffState.ACTIVE, 1, 6))


def copy_of(leaving: tuple[str, ...], deadline: datetime | None = None, cause: HandoffCause = HandoffCause.NOTICE):
    worlds = (roster("j", 1, ParallelLayout(dp=2), "a", "b"), roster("j", 2, ParallelLayout(), "a"))
    return mirror(*worlds, datetime(2026, 1, 1, tzinfo=UTC), leaving=leaving, deadline_utc=deadline, cause=cause)


def test_what_a_handoff_is_for_is_the_decision_or_who_will_go():
    at = datetime(2026, 1, 1, 12, 30, 5, tzinfo=UTC)
    assert why_opened("", (), copy_of(("b",), at)) == "b will go, the job must have left by 12:30:05 UTC"
    assert why_opened("", (), copy_of((), cause=HandoffCause.GROW)) == "handoff because of grow"
    assert why_opened("TP2 is faster", (), copy_of((), cause=HandoffCause.GROW)) == "TP2 is faster"


def test_nodes_that_go_later_are_added_to_what_a_handoff_is_for_and_told_once():
    first = why_opened("", (), copy_of(("b",)))
    both = why_opened(first, ("b",), copy_of(("b", "c")))
    assert (first, both) == ("b will go", "b will go; c will go")
    assert why_opened(both, ("b", "c"), copy_of(("b", "c"))) == both


def test_of_very_many_nodes_that_go_only_some_are_named():
    text = why_opened("", (), copy_of(tuple(f"n{number:02}" for number in range(11))))
    assert text == "n00, n01, n02, n03, n04, n05, n06, n07 and 3 more will go"
    nine = why_opened("", (), copy_of(tuple(f"n{number:02}" for number in range(9))))
    assert nine == "n00, n01, n02, n03, n04, n05, n06, n07 and 1 more will go"
    eight = why_opened("", (), copy_of(tuple(f"n{number:02}" for number in range(8))))
    assert eight == "n00, n01, n02, n03, n04, n05, n06, n07 will go"


def test_what_may_still_become_active_is_open_and_the_three_ends_are_not():
    ends = {HandoffState.ACTIVE, HandoffState.ABORTED, HandoffState.BROKEN}
    assert {state for state in HandoffState if not is_open(state)} == ends


def test_a_copy_replaces_what_is_stored_without_a_number_as_any_other_while_that_was_not_aborted():
    ready = Copy(HandoffState.READY, 1, 5)
    assert is_newer(Copy(HandoffState.CUTTING_OVER, 1, 4, 7), ready)
    assert not is_newer(Copy(HandoffState.PREPARING, 1, 6, 7), ready)
    broken = Copy(HandoffState.BROKEN, 1, 5)
    assert not is_newer(Copy(HandoffState.READY, 1, 6, 7), broken)


@pytest.mark.parametrize(
    ("times", "declined_s", "expected_s"),
    [(0, 60.0, 60.0), (0, 0.5, 0.5), (1, 60.0, 4.0), (2, 60.0, 8.0), (8, 60.0, 512.0), (9, 60.0, 960.0), (3, 0.5, 8.0)],
)
def test_how_long_the_same_is_not_proposed_again_by_hand(times, declined_s, expected_s):
    """Four seconds, doubled with each further time, and sixteen times what a declined one waits at most."""
    past = Declined(
        Placement(layout=ParallelLayout(), members=(Member("a", 0),)), (), datetime(2026, 1, 1, tzinfo=UTC), "no", times
    )
    assert past.waits_s(declined_s) == expected_s
