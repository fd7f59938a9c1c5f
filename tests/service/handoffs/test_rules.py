"""Which of two copies of a handoff is the newer truth."""

import itertools

from agent.protocol.values import HandoffState
from service.handoffs.rules import Copy, is_newer, is_open, orders_differ


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


def test_nodes_are_told_of_new_handoffs_new_plans_and_ends_and_of_nothing_between():
    ready = Copy(HandoffState.READY, 1, 5)
    assert orders_differ(ready, None)
    assert orders_differ(Copy(HandoffState.PREPARING, 2, 6), ready)
    assert orders_differ(Copy(HandoffState.ACTIVE, 1, 6), ready)
    assert orders_differ(Copy(HandoffState.ACTIVE, 1, 6), Copy(HandoffState.ABORTED, 1, 5))
    assert not orders_differ(Copy(HandoffState.CUTTING_OVER, 1, 6), ready)
    assert not orders_differ(Copy(HandoffState.ACTIVE, 1, 7), Copy(HandoffState.ACTIVE, 1, 6))
