"""The cutover of one rank: what the record in the store says rules, and nothing is applied before. Pure."""

import pytest

from liver_core.handoff import Cutover, CutoverDeadlines, Decision, FailedPart, FailureCause, Reason
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    BarrierFailed,
    BarrierPassed,
    BoundaryAgreed,
    CertificateCompared,
    CompareCertificates,
    ComparisonFailed,
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
    RedoBatchInSource,
    RedoBatchInTarget,
    StateRead,
    StoreUnreachable,
    TargetBuilt,
    Tick,
)

WHY = Reason("because", "test", 1)
FELT = FailureCause(FailedPart.PEER)
BOUNDARY = 10.0
AND_HELD = ", and every target holds the state before the step"
TARGET, SOURCE, STORE = BOUNDARY + 20, BOUNDARY + 30, BOUNDARY + 60


def cutover(*, in_source: bool = True, in_target: bool = True, dropped: bool = False) -> Cutover:
    return Cutover(
        rank=1,
        in_source=in_source,
        in_target=in_target,
        deadlines=CutoverDeadlines(),
        boundary=BoundaryAgreed(5, dropped),
        now=BOUNDARY,
    )


def drive(machine: Cutover, *events: CutoverEvent, now: float = BOUNDARY) -> tuple[CutoverEffect, ...]:
    """Feed events at one time; the effects of the last."""
    effects: tuple[CutoverEffect, ...] = ()
    for event in events:
        effects = machine.handle(event, now)
    return effects


def redone(why: str) -> tuple[CutoverEffect, ...]:
    """A batch is done again in the target world, since `why`."""
    return (RedoBatchInTarget(Reason(why, "barrier", 1)),)


def voted(machine: Cutover) -> Cutover:
    """A target that holds everything and is in the barrier."""
    drive(machine, StateRead(Level.EVERYTHING), CertificateCompared(True))
    assert machine.vote is Level.EVERYTHING
    return machine


def wish_of(effects: tuple[CutoverEffect, ...]) -> Decision:
    (effect,) = effects
    assert isinstance(effect, ProposeDecision)
    return effect.wish


def test_a_target_reads_compares_enters_the_barrier_proposes_and_steps_when_it_has_read_go():
    machine = cutover()
    assert machine.begin() == (ReadState(5, until=TARGET),)
    assert drive(machine, StateRead(Level.EVERYTHING)) == (CompareCertificates(),)
    assert drive(machine, CertificateCompared(True)) == (EnterBarrier(Level.EVERYTHING, until=TARGET),)
    assert wish_of(drive(machine, BarrierPassed(Level.EVERYTHING))) is Decision.GO
    assert drive(machine, DecisionRead(Decision.GO)) == (ApplyStepInTarget(),)
    assert machine.state is CutoverState.DECIDED
    assert machine.decision is Decision.GO


LATER_EVENTS = (
    StateRead(Level.EVERYTHING), CertificateCompared(True), CertificateCompared(False, WHY), ComparisonFailed(WHY),
    BarrierPassed(Level.EVERYTHING), BarrierFailed(WHY), DecisionRead(Decision.GO), TargetBuilt(),
    StoreUnreachable(WHY), StoreUnreachable(WHY, gone=True), Tick(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("before", "answers"),
    [
        ((), (StateRead,)),
        ((StateRead(Level.EVERYTHING),), (CertificateCompared, ComparisonFailed)),
        ((StateRead(Level.EVERYTHING), CertificateCompared(True), DecisionRead(Decision.GO)), ()),
        ((StateRead(Level.EVERYTHING), CertificateCompared(True), StoreUnreachable(WHY, gone=True)), ()),
    ],
    ids=["reading", "comparing", "decided", "fell"],
)
def test_an_event_that_answers_nothing_that_was_asked_for_changes_nothing(
    before: tuple[CutoverEvent, ...], answers: tuple[type, ...]
):
    for event in LATER_EVENTS:
        machine = cutover()
        drive(machine, *before)
        known = (machine.state, machine.vote, machine.held, machine.decision, machine.next_deadline)
        effects = drive(machine, event)
        assert bool(effects) == isinstance(event, answers), event
        if not effects:
            assert known == (machine.state, machine.vote, machine.held, machine.decision, machine.next_deadline)


def test_what_the_compare_and_set_returns_rules_and_not_the_own_wish():
    machine = voted(cutover())
    assert wish_of(drive(machine, BarrierPassed(Level.EVERYTHING))) is Decision.GO
    (effect,) = drive(machine, DecisionRead(Decision.NO_GO))
    assert isinstance(effect, ApplyStepInSource)


def test_a_target_whose_barrier_failed_still_goes_when_another_wrote_go_first():
    machine = voted(cutover())
    assert wish_of(drive(machine, BarrierFailed(WHY))) is Decision.NO_GO
    assert drive(machine, DecisionRead(Decision.GO)) == (ApplyStepInTarget(),)


def test_nobody_votes_with_a_certificate_that_differs():
    machine = cutover()
    drive(machine, StateRead(Level.EVERYTHING))
    assert drive(machine, CertificateCompared(False, WHY)) == (EnterBarrier(Level.NOTHING, until=TARGET),)
    (effect,) = drive(machine, BarrierPassed(Level.NOTHING))
    assert effect == ProposeDecision(Decision.NO_GO, WHY)


@pytest.mark.parametrize("now", [BOUNDARY, TARGET])
def test_a_target_whose_comparison_failed_here_alone_still_goes_with_what_it_holds(now: float):
    machine = cutover()
    drive(machine, StateRead(Level.EVERYTHING))
    late = drive(machine, Tick(), now=now) or drive(machine, ComparisonFailed(WHY), now=now)
    for effect in late:
        # It does not vote for what it could not compare, and never wishes to go.
        assert effect == EnterBarrier(Level.NOTHING, until=TARGET) or wish_of((effect,)) is Decision.NO_GO
    drive(machine, BarrierFailed(WHY), now=now)
    assert drive(machine, DecisionRead(Decision.GO), now=now) == (ApplyStepInTarget(),)


def test_a_go_over_a_state_that_was_compared_here_and_differs_is_not_followed():
    machine = cutover()
    drive(machine, StateRead(Level.EVERYTHING), CertificateCompared(False, WHY))
    (effect,) = drive(machine, DecisionRead(Decision.GO))
    assert isinstance(effect, FallToCheckpoint)


def test_a_lost_source_with_the_state_held_makes_the_batch_be_redone():
    machine = cutover()
    drive(machine, StateRead(Level.STATE, source_lost=True, reason=WHY))
    assert drive(machine, CertificateCompared(True)) == (EnterBarrier(Level.STATE, until=TARGET),)
    assert wish_of(drive(machine, BarrierPassed(Level.STATE))) is Decision.GO_REDO
    assert drive(machine, DecisionRead(Decision.GO_REDO)) == redone(WHY.text + AND_HELD)


def test_late_gradients_of_living_sources_are_no_reason_to_redo_a_batch():
    machine = cutover()
    effects = drive(machine, StateRead(Level.STATE, source_lost=False))
    assert effects == (EnterBarrier(Level.NOTHING, until=TARGET),)


def test_a_target_that_holds_everything_redoes_the_batch_when_another_lacks_the_gradients():
    machine = voted(cutover())
    assert wish_of(drive(machine, BarrierPassed(Level.STATE))) is Decision.GO_REDO
    assert drive(machine, DecisionRead(Decision.GO_REDO)) == redone("a source is lost" + AND_HELD)


def test_a_barrier_cannot_say_more_than_the_own_vote():
    machine = cutover()
    drive(machine, StateRead(Level.NOTHING, reason=WHY))
    assert wish_of(drive(machine, BarrierPassed(Level.EVERYTHING))) is Decision.NO_GO


def test_a_go_over_a_state_that_is_not_held_here_is_not_followed():
    machine = cutover()
    drive(machine, StateRead(Level.NOTHING, reason=WHY))
    (effect,) = drive(machine, DecisionRead(Decision.GO))
    assert isinstance(effect, FallToCheckpoint)
    assert "this rank lacks the state" in effect.reason.text
    assert effect.reason.cause == FELT, "it has not failed itself"


def test_a_target_that_holds_the_state_blames_nobody_for_another_that_does_not():
    (effect,) = drive(voted(cutover()), BarrierPassed(Level.NOTHING))
    assert isinstance(effect, ProposeDecision) and effect.reason.cause == FELT
    leaver = cutover(in_target=False)
    leaver.begin()
    drive(leaver, StateRead(Level.EVERYTHING))
    (effect,) = drive(leaver, DecisionRead(Decision.NO_GO))
    assert isinstance(effect, ApplyStepInSource) and effect.reason.cause == FELT


def test_a_leaver_publishes_stays_until_the_decision_and_enters_no_barrier():
    machine = cutover(in_target=False)
    assert machine.begin() == (ReadState(5, until=SOURCE),)
    assert drive(machine, StateRead(Level.EVERYTHING)) == (ReadDecision(not_before=BOUNDARY),)
    (again,) = drive(machine, DecisionRead(Decision.UNDECIDED))
    assert isinstance(again, ReadDecision) and again.not_before > BOUNDARY
    (effect,) = drive(machine, DecisionRead(Decision.GO))
    assert isinstance(effect, Leave)


def test_a_leaver_looks_soon_for_the_decision_and_ever_more_rarely():
    machine = cutover(in_target=False)
    drive(machine, StateRead(Level.EVERYTHING))
    looks = [effect for _ in range(6) for effect in drive(machine, DecisionRead(Decision.UNDECIDED))]
    waits = [look.not_before - BOUNDARY for look in looks if isinstance(look, ReadDecision)]
    assert waits == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.2, 0.2])


def test_a_leaver_trains_on_after_no_go():
    machine = cutover(in_target=False)
    drive(machine, StateRead(Level.EVERYTHING))
    (effect,) = drive(machine, DecisionRead(Decision.NO_GO))
    assert isinstance(effect, ApplyStepInSource)


def test_a_newcomer_leaves_after_no_go():
    machine = voted(cutover(in_source=False))
    (effect,) = drive(machine, DecisionRead(Decision.NO_GO))
    assert isinstance(effect, Leave)


def test_sources_wait_longer_than_targets_before_they_propose_no_go():
    target, leaver = cutover(), cutover(in_target=False)
    assert target.next_deadline == TARGET < leaver.next_deadline == SOURCE
    assert wish_of(drive(target, Tick(), now=TARGET)) is Decision.NO_GO
    assert drive(leaver, Tick(), now=TARGET) == ()
    assert wish_of(drive(leaver, Tick(), now=SOURCE)) is Decision.NO_GO


def test_a_target_that_is_late_does_not_enter_the_barrier_any_more():
    machine = cutover()
    drive(machine, StateRead(Level.EVERYTHING))
    (effect,) = drive(machine, CertificateCompared(True), now=TARGET)
    assert isinstance(effect, ProposeDecision)
    assert effect.wish is Decision.NO_GO
    assert effect.reason == Reason("not finished 20 s after the boundary (target)", "reading", 1, cause=FELT)
    # Comparing may have been its vote already: where the others went by it, it follows.
    assert drive(machine, DecisionRead(Decision.GO), now=TARGET) == (ApplyStepInTarget(),)


def test_an_unreachable_store_is_asked_again_with_the_same_wish():
    machine = voted(cutover())
    drive(machine, BarrierPassed(Level.EVERYTHING))
    (pause,) = drive(machine, StoreUnreachable(WHY))
    assert isinstance(pause, ReadDecision)
    assert wish_of(drive(machine, DecisionRead(Decision.UNDECIDED))) is Decision.GO


@pytest.mark.parametrize("event", [StoreUnreachable(WHY), Tick()])
def test_without_an_answer_until_the_store_deadline_nothing_is_applied_and_the_checkpoint_is_taken(event):
    machine = voted(cutover())
    drive(machine, BarrierPassed(Level.EVERYTHING))
    assert machine.next_deadline == STORE
    (effect,) = drive(machine, event, now=STORE)
    assert isinstance(effect, FallToCheckpoint)
    assert machine.state is CutoverState.FELL
    assert drive(machine, DecisionRead(Decision.GO), now=STORE) == ()


def test_a_store_whose_process_has_ended_is_not_waited_for():
    machine = voted(cutover())
    drive(machine, BarrierPassed(Level.EVERYTHING))
    assert drive(machine, StoreUnreachable(WHY, gone=True)) == (FallToCheckpoint(WHY),)
    assert machine.state is CutoverState.FELL


def test_a_decision_that_changes_is_an_error():
    machine = voted(cutover())
    drive(machine, DecisionRead(Decision.GO))
    assert drive(machine, DecisionRead(Decision.GO)) == ()
    with pytest.raises(AssertionError, match="the decision changed: go, no_go"):
        drive(machine, DecisionRead(Decision.NO_GO))


def test_a_world_from_a_checkpoint_starts_by_redoing_the_batch():
    machine = cutover(in_source=False)
    nobody = Reason("there is no source world", "read")
    drive(machine, StateRead(Level.STATE, source_lost=True, reason=nobody))
    drive(machine, CertificateCompared(True), BarrierPassed(Level.STATE))
    assert drive(machine, DecisionRead(Decision.GO_REDO)) == redone(nobody.text + AND_HELD)


def dropped(*, in_source: bool = True, in_target: bool = True) -> Cutover:
    return cutover(in_source=in_source, in_target=in_target, dropped=True)


def test_after_a_dropped_step_the_state_is_all_that_a_target_needs_and_the_batch_is_redone():
    machine = dropped()
    assert drive(machine, StateRead(Level.STATE)) == (CompareCertificates(),)
    assert drive(machine, CertificateCompared(True)) == (EnterBarrier(Level.STATE, until=TARGET),)
    (effect,) = drive(machine, BarrierPassed(Level.STATE))
    text = "the step was dropped" + AND_HELD
    assert effect == ProposeDecision(Decision.GO_REDO, Reason(text, "barrier", 1))
    assert drive(machine, DecisionRead(Decision.GO_REDO)) == redone(text)


@pytest.mark.parametrize("in_target", [True, False])
def test_no_go_after_a_dropped_step_makes_the_old_world_do_the_batch_again(in_target: bool):
    machine = dropped(in_target=in_target)
    drive(machine, StateRead(Level.NOTHING if in_target else Level.EVERYTHING, reason=WHY))
    if in_target:
        assert wish_of(drive(machine, BarrierFailed(WHY))) is Decision.NO_GO
    (effect,) = drive(machine, DecisionRead(Decision.NO_GO))
    assert isinstance(effect, RedoBatchInSource)
    assert effect.reason.rank == 1


def test_a_newcomer_leaves_after_no_go_though_a_step_was_dropped():
    machine = dropped(in_source=False)
    drive(machine, StateRead(Level.STATE), CertificateCompared(True))
    (effect,) = drive(machine, DecisionRead(Decision.NO_GO))
    assert isinstance(effect, Leave)


def test_nobody_goes_with_gradients_after_a_dropped_step():
    machine = dropped()
    with pytest.raises(AssertionError, match="no gradients"):
        drive(machine, StateRead(Level.EVERYTHING))
    machine = dropped()
    drive(machine, StateRead(Level.STATE), CertificateCompared(True))
    (effect,) = drive(machine, DecisionRead(Decision.GO))
    assert isinstance(effect, FallToCheckpoint)
