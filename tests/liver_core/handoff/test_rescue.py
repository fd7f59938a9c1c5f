"""A rescue in the machines: survivors vote, leavers go at the decision, the target world is built after it. Pure."""

from dataclasses import replace

import pytest

from liver_core.handoff import Cutover, CutoverDeadlines, Decision, FailedPart, FailureCause, Phase, Reason, Rung, Stage
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    BarrierPassed,
    BoundaryAgreed,
    BuildTarget,
    CertificateCompared,
    CutoverEffect,
    CutoverEvent,
    CutoverState,
    DecisionRead,
    EnterBarrier,
    FallToCheckpoint,
    Leave,
    Level,
    ProposeDecision,
    ReadDecision,
    ReadState,
    RedoBatchInTarget,
    StateRead,
    TargetBuilt,
    Tick,
)
from liver_core.handoff.participant_events import OrderReceived, ParticipantState, RankStage
from liver_core.handoff.proposer import GIVE_UP_S, ProposerState
from liver_core.handoff.proposer_events import (
    Amend,
    Cancel,
    HandoffEnded,
    MemberLost,
    Open,
    Refused,
    ReportReceived,
    SendOrder,
)
from liver_core.layout import Member
from tests.liver_core.handoff.samples import (
    DEADLINE,
    A,
    B,
    C,
    order,
    participant,
    participant_in,
    proposal,
    proposer,
    rank_says,
    reports_in,
)

WHY = Reason("because", "test", 1)
BOUNDARY = 10.0
DEADLINES = CutoverDeadlines(build_s=40.0)


def cutover(*, in_source: bool = True, in_target: bool = True, at: float = BOUNDARY) -> Cutover:
    return Cutover(
        rank=1,
        in_source=in_source,
        in_target=in_target,
        deadlines=DEADLINES,
        boundary=BoundaryAgreed(5),
        now=at,
        rescues=True,
    )


def drive(machine: Cutover, *events: CutoverEvent, now: float = BOUNDARY) -> tuple[CutoverEffect, ...]:
    """Feed events at one time; the effects of the last."""
    effects: tuple[CutoverEffect, ...] = ()
    for event in events:
        effects = machine.handle(event, now)
    return effects


def released(machine: Cutover) -> Cutover:
    """A survivor that holds its share, after the decision."""
    drive(machine, StateRead(Level.STATE), CertificateCompared(True))
    drive(machine, BarrierPassed(Level.STATE), DecisionRead(Decision.GO_REDO))
    assert machine.state is CutoverState.BUILDING
    return machine


def test_a_survivor_reads_its_share_compares_votes_and_builds_when_it_has_read_go_redo():
    machine = cutover()
    assert machine.begin() == (ReadState(5, until=BOUNDARY + 20),)
    drive(machine, StateRead(Level.STATE))
    assert drive(machine, CertificateCompared(True)) == (EnterBarrier(Level.STATE, until=BOUNDARY + 20),)
    (effect,) = drive(machine, BarrierPassed(Level.STATE))
    text = "survivors hold all state that only leavers had"
    assert effect == ProposeDecision(Decision.GO_REDO, Reason(text, "barrier", 1))
    assert drive(machine, DecisionRead(Decision.GO_REDO)) == (BuildTarget(until=BOUNDARY + 40),)
    assert drive(machine, TargetBuilt()) == (RedoBatchInTarget(Reason(text, "barrier", 1)),)
    assert (machine.state, machine.decision) == (CutoverState.DECIDED, Decision.GO_REDO)


def test_a_share_that_is_missing_or_differs_keeps_the_leavers_and_the_old_world_trains_on():
    for events in ((StateRead(Level.NOTHING, reason=WHY),), (StateRead(Level.STATE), CertificateCompared(False, WHY))):
        machine = cutover()
        drive(machine, *events)
        assert machine.vote is Level.NOTHING
        (effect,) = drive(machine, BarrierPassed(Level.NOTHING))
        assert effect == ProposeDecision(Decision.NO_GO, WHY)
        assert drive(machine, DecisionRead(Decision.NO_GO)) == (ApplyStepInSource(WHY),)


def test_a_leaver_stays_until_it_has_read_the_decision():
    machine = cutover(in_target=False)
    assert drive(machine, StateRead(Level.EVERYTHING)) == (ReadDecision(not_before=BOUNDARY),)
    assert drive(machine, DecisionRead(Decision.UNDECIDED)) == (ReadDecision(not_before=BOUNDARY + 0.02),)
    (effect,) = drive(machine, DecisionRead(Decision.GO_REDO))
    assert isinstance(effect, Leave)


@pytest.mark.parametrize("at", [BOUNDARY, BOUNDARY + 1000.0])
def test_a_newcomer_has_no_vote_may_come_late_and_builds_with_the_survivors(at: float):
    machine = cutover(in_source=False, at=at)
    assert machine.begin() == (ReadDecision(not_before=at),)
    assert drive(machine, DecisionRead(Decision.GO_REDO), now=at) == (BuildTarget(until=at + 40),)
    text = "survivors hold all state that only leavers had"
    assert drive(machine, TargetBuilt(), now=at) == (RedoBatchInTarget(Reason(text, "barrier", 1)),)


def test_a_newcomer_leaves_after_no_go_and_never_goes_with_gradients():
    for decision, ending in ((Decision.NO_GO, Leave), (Decision.GO, FallToCheckpoint)):
        machine = cutover(in_source=False)
        (effect,) = drive(machine, DecisionRead(decision))
        assert isinstance(effect, ending)


def test_what_fails_after_the_release_is_the_checkpoints_with_its_reason():
    machine = released(cutover())
    assert drive(machine, TargetBuilt(WHY)) == (FallToCheckpoint(WHY),)
    machine = released(cutover())
    assert machine.next_deadline == BOUNDARY + 40
    assert drive(machine, Tick(), now=BOUNDARY + 39.9) == ()
    (effect,) = drive(machine, Tick(), now=BOUNDARY + 40)
    assert isinstance(effect, FallToCheckpoint)
    assert str(effect.reason) == "rank 1, build: the next world is not ready 40 s after the decision"
    assert effect.reason.cause == FailureCause(FailedPart.PEER), "it may be another that is late"


def test_nobody_votes_with_gradients_in_a_rescue():
    machine = cutover()
    with pytest.raises(AssertionError, match="there are no gradients to hold"):
        drive(machine, StateRead(Level.EVERYTHING))


def opened():
    """A rescue of what b holds, by a; c is new."""
    machine = proposer()
    machine.handle(Open(proposal(rung=Rung.RESCUE, cutover=DEADLINES)), 3.0)
    return machine


def truth(state: ParticipantState, member: Member) -> ReportReceived:
    report = reports_in(participant_in(state, member).handle(OrderReceived(order()), 3.0))[0]
    return ReportReceived(report)


def left(member: Member) -> ReportReceived:
    machine = participant_in(ParticipantState.CUTTING_OVER, member)
    said = reports_in(machine.handle(rank_says(RankStage.LEFT, decision=Decision.GO_REDO), 3.0))[0]
    return ReportReceived(replace(said, report_seq=9))


def orders_to(effects) -> set[Member]:
    return {effect.member for effect in effects if isinstance(effect, SendOrder)}


def test_permission_waits_for_no_newcomer_and_reaches_it_when_it_comes():
    machine = opened()
    machine.handle(truth(ParticipantState.READY, A), 3.0)
    assert machine.state is ProposerState.PREPARING
    effects = machine.handle(truth(ParticipantState.READY, B), 3.0)
    assert machine.state is ProposerState.PERMITTED
    assert orders_to(effects) == {A, B, C}
    # It is not ready yet: the order is said again.
    machine.handle(truth(ParticipantState.PREPARING, C), 4.0)
    assert C in orders_to(machine.handle(Tick(), 6.0))


def test_a_leaver_that_has_left_is_not_missed_and_the_rest_may_build_beyond_the_deadline():
    machine = opened()
    for report in (truth(ParticipantState.READY, A), truth(ParticipantState.READY, B), left(B)):
        machine.handle(report, 3.0)
    machine.handle(MemberLost(B, WHY), 4.0)
    latest = DEADLINE + DEADLINES.store_s + DEADLINES.build_s + GIVE_UP_S
    assert machine.handle(Tick(), latest)
    assert machine.state is ProposerState.PERMITTED
    ended = [effect for effect in machine.handle(Tick(), latest + 0.1) if isinstance(effect, HandoffEnded)]
    assert [(each.stage, each.reason.phase) for each in ended] == [(Stage.BROKEN, "first step")]


def test_a_rescue_that_has_permission_is_not_called_off_since_leavers_may_be_gone_already():
    machine = opened()
    for member in (A, B):
        machine.handle(truth(ParticipantState.READY, member), 3.0)
    (refused,) = machine.handle(Cancel(WHY), 3.5)
    assert isinstance(refused, Refused) and "the rescue has permission" in refused.reason.text
    assert machine.state is ProposerState.PERMITTED
    # Another node goes: once all tags are gone for that, nobody can be, and it is too late no more.
    sooner = proposal(rung=Rung.RESCUE, cutover=DEADLINES, deadline_utc=DEADLINE - 5)
    machine.handle(Amend(sooner), 4.0)
    assert machine.state is ProposerState.WITHDRAWING
    for member in (A, B, C):
        answers = participant_in(ParticipantState.WITHDRAWING, member)
        (report,) = reports_in(answers.handle(rank_says(RankStage.PREPARED), 4.5))
        machine.handle(ReportReceived(replace(report, report_seq=9)), 4.5)
    assert (machine.state, machine.record.reason) == (ProposerState.ABORTING, WHY)
    preparing = opened()
    assert not any(isinstance(effect, Refused) for effect in preparing.handle(Cancel(WHY), 3.5))
    assert preparing.state is ProposerState.ABORTING


def test_a_newcomer_hears_of_an_abort_only_when_no_source_can_reach_the_boundary_any_more():
    machine = opened()
    for member in (A, B, C):
        machine.handle(truth(ParticipantState.READY, member), 3.0)
    # Both sources show their tags; one gives up at its deadline in the moment in which its rank reaches the boundary.
    effects = machine.handle(Tick(), DEADLINE + 0.1)
    assert machine.state is ProposerState.ABORTING
    assert orders_to(effects) == {A, B}
    machine.handle(truth(ParticipantState.CUTTING_OVER, A), DEADLINE + 0.2)
    assert orders_to(machine.handle(Tick(), DEADLINE + 2.0)) == {A, B}
    machine.handle(left(B), DEADLINE + 2.1)
    assert machine.state is ProposerState.PERMITTED


def test_a_newcomer_is_told_to_abort_when_every_source_has_dropped_the_plan_or_is_lost():
    machine = opened()
    machine.handle(MemberLost(B, WHY), 3.0)
    assert machine.state is ProposerState.ABORTING
    machine.handle(truth(ParticipantState.PREPARING, C), 3.1)
    assert orders_to(machine.handle(Tick(), 5.0)) == {A}
    (dropped,) = reports_in(participant_in(ParticipantState.ABORTING, A).handle(rank_says(RankStage.ABORTED), 5.0))
    machine.handle(ReportReceived(replace(dropped, report_seq=9)), 5.1)
    assert orders_to(machine.handle(Tick(), 7.5)) == {B, C}


def test_only_a_rescue_has_time_to_build_after_the_decision():
    assert DEADLINES.over_s(Rung.RESCUE) == 100.0
    assert {DEADLINES.over_s(rung) for rung in Rung if rung is not Rung.RESCUE} == {60.0}


@pytest.mark.parametrize(("member", "limit"), [(A, DEADLINE), (B, DEADLINE), (C, DEADLINE + DEADLINES.build_s)])
def test_the_deadline_is_that_of_the_old_world_and_newcomers_may_come_while_the_next_one_is_built(
    member: Member, limit: float
):
    machine = participant(member)
    machine.handle(OrderReceived(order(rung=Rung.RESCUE, cutover=DEADLINES)), 1.0)
    assert machine.handle(Tick(), limit) == ()
    machine.handle(Tick(), limit + 0.1)
    assert machine.state is ParticipantState.ABORTING


@pytest.mark.parametrize("revision", [1, 2])
@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.PERMIT])
def test_an_order_that_comes_after_the_deadline_is_taken_by_a_newcomer_for_as_long_as_it_has_time(
    phase: Phase, revision: int
):
    """The leavers may have been released by then, and it may not have heard of anything before its permission."""
    rescue = order(rung=Rung.RESCUE, cutover=DEADLINES)
    sooner = replace(rescue, plan_revision=revision, deadline_utc=DEADLINE - 1.0)
    for member, now, taken in (
        (A, DEADLINE - 0.9, False),
        (C, DEADLINE - 0.9, True),
        (C, DEADLINE - 1.0 + DEADLINES.build_s, True),
        (C, DEADLINE - 0.9 + DEADLINES.build_s, False),
    ):
        machine = participant(member)
        if revision > 1:
            machine.handle(OrderReceived(rescue), 1.0)
        machine.handle(OrderReceived(replace(sooner, phase=phase)), now)
        held = machine.record.promise
        assert (held is not None and held.plan_revision == revision) is taken, (member, now)
        assert held is None or held.phase is not Phase.PERMIT, "it has nothing that could cut over"
