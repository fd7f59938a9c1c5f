"""A proposer that opens its next handoff has ended the one before, also for a member that never got its abort. Pure."""

import pytest

from liver_core.handoff import Phase
from liver_core.handoff.participant_events import (
    AbortRank,
    OrderReceived,
    ParticipantState,
    Persist,
    PrepareRank,
    RankStage,
    SendReport,
)
from tests.liver_core.handoff.samples import H1, H2, order, participant_in, rank_says, reports_in

NOW = 3.0
NEXT = order(handoff_id=H2, generation=3)


def take(machine, message):
    return machine.handle(OrderReceived(message), NOW)


def kinds(effects):
    return [type(effect) for effect in effects]


@pytest.mark.parametrize(
    "state",
    [ParticipantState.PREPARING, ParticipantState.STREAMING, ParticipantState.READY, ParticipantState.PERMITTED],
)
def test_the_promised_handoff_is_aborted_and_the_next_one_promised_when_it_comes_again(state):
    machine = participant_in(state)
    effects = take(machine, NEXT)
    (report,) = reports_in(effects)
    assert kinds(effects)[0] is Persist and AbortRank in kinds(effects)
    assert (report.handoff_id, report.promise.phase) == (H1, Phase.ABORT)
    (still,) = reports_in(take(machine, NEXT))
    assert (still.handoff_id, machine.state) == (H1, ParticipantState.ABORTING)
    machine.handle(rank_says(RankStage.ABORTED), NOW)
    assert kinds(take(machine, NEXT)) == [Persist, PrepareRank, SendReport]
    assert machine.record.promise.handoff_id == H2
    (ended,) = machine.record.ended
    assert ended.handoff_id == H1 and "its proposer has opened handoff h2" in ended.reason.text


@pytest.mark.parametrize(
    "message",
    [
        order(handoff_id=H2, generation=3, proposer_id="another"),
        order(handoff_id=H2, generation=2),
        order(handoff_id=H2, generation=3, parent=2),
        order(handoff_id=H2, generation=3, job_id="other"),
        order(Phase.ABORT, handoff_id=H2, generation=3),
    ],
)
def test_no_other_order_ends_the_promised_handoff(message):
    machine = participant_in(ParticipantState.READY)
    (report,) = reports_in(take(machine, message))
    assert (report.promise.handoff_id, report.promise.phase) == (H1, Phase.PREPARE)
    assert machine.state is ParticipantState.READY


@pytest.mark.parametrize("state", [ParticipantState.CUTTING_OVER, ParticipantState.ACTIVE])
def test_past_its_boundary_the_promised_handoff_is_not_taken_back(state):
    machine = participant_in(state)
    assert AbortRank not in kinds(take(machine, NEXT))
    assert H1 in {machine.record.promise.handoff_id, *(ended.handoff_id for ended in machine.record.ended)}
