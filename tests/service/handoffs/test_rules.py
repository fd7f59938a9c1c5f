"""Which of two copies of a handoff is the newer truth, and what it is for."""

import itertools
from datetime import UTC, datetime

from agent.protocol.values import HandoffCause, HandoffState
from liver_core.layout import ParallelLayout
from service.handoffs.rules import Copy, is_newer, is_open, orders_differ, replaces, why_opened
from tests.service.fake_agent import mirror, roster


def test_an_end_beats_what_is_open_whatever_the_sequence():
    assert is_newer(Copy(HandoffState.ABORTED, 1, 0), Copy(HandoffState.READY, 3, 99))
    assert not is_newer(Copy(HandoffState.READY, 3, 99), Copy(HandoffState.ABORTED, 1, 0))


def test_active_beats_aborted_and_broken_beats_both():
    assert is_newer(Copy(HandoffState.ACTIVE, 1, 0), Copy(HandoffState.ABORTED, 2, 9))
    assert is_newer(Copy(HandoffState.BROKEN, 1, 0), Copy(HandoffState.ACTIVE, 1, 9))


def test_an_amended_plan_is_newer_although_it_prepares_again():
    assert is_newer(Copy(HandoffState.PREPARING, 2, 5), Copy(HandoffState.READY, 1, 9))


def test_at_the_same_place_the_sequence_decides():
    assert is_newer(Copy(HandoffState.READY, 1, 6), Copy(HandoffState.READY, 1, 5))
    assert not is_newer(Copy(HandoffState.READY, 1, 5), Copy(HandoffState.READY, 1, 5))


def test_of_two_different_copies_exactly_one_is_newer():
    copies = [Copy(state, revision, seq) for state in HandoffState for revision in (1, 2) for seq in (0, 1)]
    for one, other in itertools.combinations(copies, 2):
        ended = not is_open(one.state) and one.state is other.state
        if ended and one.mirror_seq == other.mirror_seq:
            continue
        assert is_newer(one, other) != is_newer(other, one)


def test_a_handoff_that_was_dropped_before_it_had_a_number_is_opened_anew_only_by_a_copy_made_later():
    """An older copy, that a peer passes on late, is not the news of an agent that drives it on."""
    dropped = Copy(HandoffState.ABORTED, 1, 4)
    for state in (HandoffState.PREPARING, HandoffState.READY, HandoffState.ABORTED):
        assert replaces(Copy(state, 1, 5), dropped, has_number=False)
        assert not replaces(Copy(state, 1, 3), dropped, has_number=False)
        assert not replaces(Copy(state, 1, 4), dropped, has_number=False)
    assert not replaces(Copy(HandoffState.READY, 1, 5), dropped, has_number=True)


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
