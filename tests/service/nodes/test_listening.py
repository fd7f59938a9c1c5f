"""Time in which the service could not hear anybody, however it came about."""

from datetime import UTC, datetime, timedelta

import pytest

from service.nodes.listening import BEAT_S, WAITS, Listening

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


class Moments:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.mark.parametrize(
    ("deaf", "silence_s"),
    [
        ([], 30.0),
        ([(10, 20)], 20.0),
        ([(-20, -10)], 30.0),
        ([(-20, 5)], 25.0),
        ([(25, 60)], 25.0),
        ([(10, 20), (15, 25)], 15.0),
        ([(20, 25), (10, 15), (12, 13)], 20.0),
        ([(-5, 40)], 0.0),
    ],
)
def test_only_the_time_in_which_it_listened_counts(deaf, silence_s):
    listening = Listening(at(-100))
    for start, end in deaf:
        listening.was_deaf(at(start), at(end))
    assert listening.silence_s(at(0), at(30)) == silence_s


def test_nothing_before_it_began_counts():
    listening = Listening(at(-100))
    listening.begins(at(20))
    assert listening.silence_s(at(0), at(30)) == 10.0
    assert listening.silence_s(at(0), at(15)) == 0.0


def test_while_the_event_loop_stands_nobody_is_heard_and_afterwards_that_is_remembered():
    moments = Moments()
    listening = Listening(at(-100), monotonic=moments)
    listening.beat(at(0))
    moments.s += 20
    assert listening.silence_s(at(0), at(20)) == BEAT_S, "it stands still"
    listening.beat(at(20))
    moments.s += BEAT_S
    listening.beat(at(20 + BEAT_S))
    assert listening.silence_s(at(0), at(20 + BEAT_S)) == 2 * BEAT_S


def test_a_beat_that_is_a_little_late_is_no_standstill():
    moments = Moments()
    listening = Listening(at(-100), monotonic=moments)
    for second in range(20):
        listening.beat(at(second))
        moments.s += 1
    assert listening.silence_s(at(0), at(20)) == 20


def test_when_a_node_tried_is_given_out_once():
    listening = Listening(at(0))
    listening.tried("a", at(1))
    listening.tried("a", at(2))
    assert listening.take_tried(at(3)) == {"a": at(2)}
    assert listening.take_tried(at(3)) == {}


def test_a_report_that_waits_counts_from_when_it_arrived_and_one_that_is_stored_does_not():
    listening = Listening(at(0))
    listening.waits("a", at(1))
    listening.waits("b", at(1))
    listening.is_done("b")
    assert listening.take_tried(at(1)) == {}
    assert listening.take_tried(at(1) + WAITS) == {"a": at(1)}
    assert listening.take_tried(at(5)) == {}
    listening.waits("a", at(6))
    listening.tried("a", at(8))
    assert listening.take_tried(at(9)) == {"a": at(8)}
