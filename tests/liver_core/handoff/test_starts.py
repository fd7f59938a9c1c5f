"""What a participant does when the service starts the job again: the older world ends first, and for good. Pure."""

from dataclasses import replace

import pytest

from liver_core.handoff import Decision, ParticipantRecord, Phase, Stage
from liver_core.handoff.participant_events import (
    OrderReceived,
    ParticipantState,
    Persist,
    RankDied,
    RankStage,
    SendReport,
    StartRank,
    StartReceived,
    StopRank,
    Tick,
    WorldReplaced,
)
from tests.liver_core.handoff.samples import (
    G1,
    H2,
    STARTED,
    WHY,
    A,
    B,
    C,
    order,
    participant,
    participant_in,
    rank_says,
    reports_in,
    roster,
    start,
)

NOW = 3.0
BOUND = [
    state
    for state in ParticipantState
    if state not in (ParticipantState.IDLE, ParticipantState.REPLACED, ParticipantState.RESTORING)
]


def begun(effects):
    """The start whose rank is started."""
    (found,) = [effect.order for effect in effects if isinstance(effect, StartRank)]
    return found


def test_the_rank_of_the_older_world_has_ended_before_the_one_of_a_start_begins():
    machine = participant()
    persist, stop = machine.handle(StartReceived(start()), NOW)
    assert isinstance(persist, Persist) and persist.record.highest_generation == STARTED
    assert persist.record.replaced is not None and stop == StopRank(persist.record.replaced, at_once=True)
    assert machine.record.active == G1, "it steps there until it has ended"
    persist, begins = machine.handle(RankDied(WHY), NOW)
    assert persist.record.active == start().target and persist.born == begins.order == start()
    assert machine.state is ParticipantState.IDLE and machine.record.replaced is None


def test_a_member_without_a_rank_starts_one_at_once_and_hears_the_same_start_again_for_nothing():
    machine = participant(C)
    assert begun(machine.handle(StartReceived(start()), NOW)) == start()
    record = machine.record
    for event in (StartReceived(start()), WorldReplaced(STARTED), StartReceived(start(generation=2))):
        assert machine.handle(event, NOW) == ()
    assert machine.record == record


def test_a_rank_of_a_start_that_dies_is_not_started_again():
    machine = participant(C)
    machine.handle(StartReceived(start()), NOW)
    machine.handle(RankDied(WHY), NOW)
    assert machine.record.active is None
    assert machine.handle(StartReceived(start()), NOW) == ()


def test_a_member_that_has_no_part_in_a_start_ends_its_rank_and_no_older_number_counts_any_more():
    machine = participant(B)
    machine.handle(WorldReplaced(STARTED), NOW)
    machine.handle(RankDied(WHY), NOW)
    assert machine.record.active is None and machine.record.highest_generation == STARTED - 1
    late = order(generation=2, parent=1, target=roster(2, A, B), source=roster(1, A, C))
    (report,) = reports_in(machine.handle(OrderReceived(late), NOW))
    assert (report.stage, report.promise) == (Stage.ABORTED, None)
    assert f"2 is used up, the highest seen is {STARTED - 1}" in report.reason.text


def test_an_older_world_is_given_up_though_a_greater_number_than_that_of_the_start_was_heard_of():
    """The abort of a handoff from the newer world came before the news of that world."""
    machine = participant_in(ParticipantState.CUTTING_OVER)
    later = order(Phase.ABORT, handoff_id=H2, generation=STARTED + 1, parent=STARTED, source=None)
    machine.handle(OrderReceived(later), NOW)
    assert machine.record.highest_generation == STARTED + 1
    effects = machine.handle(WorldReplaced(STARTED), NOW)
    assert any(isinstance(effect, StopRank) for effect in effects)
    assert machine.handle(WorldReplaced(STARTED), NOW) == ()
    assert machine.record.highest_generation == STARTED + 1


def test_a_start_that_comes_after_its_number_was_heard_of_begins_all_the_same():
    machine = participant()
    machine.handle(WorldReplaced(STARTED), NOW)
    assert not any(isinstance(effect, StartRank) for effect in machine.handle(StartReceived(start()), NOW))
    assert begun(machine.handle(RankDied(WHY), NOW)) == start()


def test_a_newer_start_takes_the_place_of_one_that_still_waits_for_the_older_rank_to_end():
    machine = participant()
    machine.handle(StartReceived(start()), NOW)
    newer = start(A, B, generation=200_001, name="s2")
    machine.handle(StartReceived(newer), NOW)
    assert machine.handle(StartReceived(start()), NOW) == ()
    assert begun(machine.handle(RankDied(WHY), NOW)) == newer


def test_a_start_without_this_member_undoes_one_that_still_waits():
    machine = participant()
    machine.handle(StartReceived(start()), NOW)
    machine.handle(WorldReplaced(200_001), NOW)
    machine.handle(RankDied(WHY), NOW)
    assert machine.record.active is None and machine.record.start is None


@pytest.mark.parametrize("state", BOUND)
def test_a_start_ends_whatever_handoff_is_under_way_and_the_end_is_kept_with_its_reason(state):
    machine = participant_in(state)
    machine.handle(StartReceived(start()), NOW)
    assert machine.state is ParticipantState.REPLACED and machine.record.promise is None
    (ended,) = machine.record.ended
    may_go_on = state in (ParticipantState.PERMITTED, ParticipantState.CUTTING_OVER)
    assert ended.stage is (
        Stage.ACTIVE if state is ParticipantState.ACTIVE else Stage.BROKEN if may_go_on else Stage.ABORTED
    )
    assert str(ended.reason) == f"rank 0, start: the service has started generation {STARTED}"
    assert machine.handle(OrderReceived(order()), NOW) == (), "nothing is told before the rank has ended"
    machine.handle(RankDied(WHY), NOW)
    (report,) = reports_in(machine.handle(OrderReceived(order(Phase.PERMIT)), NOW))
    assert (report.stage, report.reason) == (ended.stage, ended.reason)


def test_what_a_rank_says_that_is_being_ended_changes_nothing():
    machine = participant_in(ParticipantState.CUTTING_OVER)
    machine.handle(StartReceived(start()), NOW)
    record = machine.record
    for stage in (RankStage.ACTIVE, RankStage.TRAINING, RankStage.BROKEN, RankStage.LEFT):
        assert machine.handle(rank_says(stage, decision=Decision.GO), NOW) == ()
    assert machine.record == record


def test_an_agent_that_restarts_ends_the_rank_of_a_world_that_was_given_up_and_then_starts_the_other():
    machine = participant()
    machine.handle(StartReceived(start()), NOW)
    restarted = participant(A, machine.record)
    (stop,) = restarted.start(NOW)
    assert isinstance(stop, StopRank) and stop.at_once
    assert restarted.handle(Tick(), NOW) == (stop,), "until it has ended"
    assert begun(restarted.handle(RankDied(WHY), NOW)) == start()


def test_an_agent_that_does_not_know_yet_where_its_rank_stands_ends_it_for_a_start():
    machine = participant_in(ParticipantState.RESTORING)
    effects = machine.handle(StartReceived(start()), NOW)
    assert any(isinstance(effect, StopRank) for effect in effects)
    assert begun(machine.handle(RankDied(WHY), NOW)) == start()


def test_a_newcomer_of_a_handoff_is_ended_for_a_start_though_it_is_in_no_world_yet():
    machine = participant_in(ParticipantState.PREPARING, C)
    effects = machine.handle(WorldReplaced(STARTED), NOW)
    assert [type(effect) for effect in effects] == [Persist, StopRank]
    machine.handle(RankDied(WHY), NOW)
    assert machine.record == ParticipantRecord(
        highest_generation=STARTED - 1, ended=machine.record.ended, reason=machine.record.reason
    )


def test_a_start_of_another_job_or_without_this_member_is_none():
    machine = participant()
    assert machine.handle(StartReceived(replace(start(), job_id="other")), NOW) == ()
    assert machine.handle(StartReceived(start(B, C)), NOW) == ()
    assert machine.record.active == G1


def test_a_rank_of_a_start_takes_part_in_the_next_handoff():
    machine = participant(C)
    machine.handle(StartReceived(start()), NOW)
    following = roster(STARTED + 1, A, B)
    wanted = order(generation=STARTED + 1, parent=STARTED, source=start().target, target=following)
    effects = machine.handle(OrderReceived(wanted), NOW)
    assert machine.record.promise is not None
    assert isinstance(effects[-1], SendReport) and effects[-1].report.stage is Stage.PREPARING
