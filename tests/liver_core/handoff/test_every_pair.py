"""Every machine takes every event in every state: nothing raises, and what must hold holds afterwards. Pure.

This also drives the pairs that the simulator declares impossible: a host may be wrong, the machine may not follow it.
"""

import pytest

from liver_core.handoff import Cutover, CutoverDeadlines, Decision, Phase, ProposerRecord
from liver_core.handoff.cutover import (
    ApplyStepInSource,
    ApplyStepInTarget,
    BarrierFailed,
    BarrierPassed,
    BoundaryAgreed,
    CertificateCompared,
    ComparisonFailed,
    CutoverEvent,
    CutoverState,
    DecisionRead,
    EnterBarrier,
    Leave,
    Level,
    RedoBatchInTarget,
    StateRead,
    StoreUnreachable,
    TargetBuilt,
    Tick,
)
from liver_core.handoff.participant_events import (
    OrderReceived,
    ParticipantState,
    Persist,
    PrepareRank,
    RankReported,
    RankStage,
    SendReport,
    SetReadyTag,
    StartRank,
)
from liver_core.handoff.participant_table import EVENTS
from liver_core.handoff.proposer import ProposerState
from liver_core.handoff.proposer_events import (
    Amend,
    Cancel,
    MemberLost,
    Open,
    PersistProposal,
    ProposerEvent,
    ReportReceived,
    SendOrder,
)
from tests.liver_core.handoff.samples import (
    H2,
    WHY,
    A,
    B,
    C,
    every_participant_event,
    order,
    participant,
    participant_in,
    proposal,
    proposer,
    rank_says,
    reports_in,
)
from tests.simulation.coverage import CUTOVER_EVENTS, PROPOSER_EVENTS, Coverage, every_pair

NOW = 3.0
LATE = 10_000.0


@pytest.mark.parametrize("now", [NOW, LATE])
@pytest.mark.parametrize("member", [A, B, C])
@pytest.mark.parametrize("state", list(ParticipantState))
def test_a_participant_takes_every_event_and_speaks_only_what_is_on_disk(state, member, now):
    for event in every_participant_event():
        machine = participant_in(state, member) if state is not ParticipantState.IDLE else participant(member)
        disk = machine.record
        for effect in machine.handle(event, now):
            if isinstance(effect, Persist):
                disk = effect.record
            if isinstance(effect, SendReport):
                assert effect.report.promise == disk.promise
                assert effect.report.highest_generation == disk.highest_generation
            if isinstance(effect, PrepareRank):
                assert disk.promise is not None and disk.promise.handoff_id == effect.order.handoff_id
            if isinstance(effect, StartRank):
                assert disk.active == effect.order.target and disk.replaced is None and disk.promise is None
            if isinstance(effect, SetReadyTag):
                assert disk.promise is not None and disk.promise.phase is Phase.PERMIT
        assert machine.record == disk, f"{event} changed what is not journalled"
        assert (machine.record.promise is None) == (machine.record.order is None)
        assert len(machine.record.ended) <= 8
        if machine.state is ParticipantState.IDLE:
            assert machine.record.promise is None


@pytest.mark.parametrize("state", list(ParticipantState))
def test_a_restarted_participant_still_knows_what_it_promised(state):
    machine = participant_in(state) if state is not ParticipantState.IDLE else participant()
    restarted = participant(A, machine.record)
    restarted.start(NOW)
    assert restarted.record.promise == machine.record.promise
    gives_up = state is ParticipantState.REPLACED
    assert restarted.state is (ParticipantState.REPLACED if gives_up else ParticipantState.RESTORING)


def proposer_in(state: ProposerState):
    machine = proposer()
    if state is ProposerState.IDLE:
        return machine
    machine.handle(Open(proposal()), 1.0)
    if state is ProposerState.ABORTING:
        machine.handle(Cancel(WHY), 2.0)
    for wanted in (ProposerState.PERMITTED, ProposerState.RETIRING):
        if machine.state is state:
            break
        if machine.state is ProposerState.PERMITTED and state is ProposerState.WITHDRAWING:
            machine.handle(Amend(proposal(members=(A, B))), 2.0)
            break
        reached = ParticipantState.READY if wanted is ProposerState.PERMITTED else ParticipantState.ACTIVE
        for report in reports_from(reached):
            machine.handle(report, 2.0)
    assert machine.state is state
    return machine


def reports_from(state: ParticipantState) -> list[ReportReceived]:
    """What a, b and c say when they have come to `state` (b leaves where a and c are active)."""
    reports = []
    for member in (A, B, C):
        machine = participant_in(state, member)
        if member is B and state is ParticipantState.ACTIVE:
            machine = participant_in(ParticipantState.CUTTING_OVER, B)
            said = reports_in(machine.handle(rank_says(RankStage.LEFT, decision=Decision.GO), NOW))
        else:
            said = reports_in(machine.handle(OrderReceived(order()), NOW))
        reports += [ReportReceived(report) for report in said]
    return reports


def every_proposer_event() -> list[ProposerEvent]:
    states = [state for state in ParticipantState if state not in (ParticipantState.IDLE, ParticipantState.RESTORING)]
    reports = [report for state in states for report in reports_from(state)]
    return [
        Open(proposal(handoff_id=H2)),
        Open(proposal(handoff_id=H2, job_id="other")),
        Amend(proposal(members=(A, B))),
        Amend(proposal(handoff_id=H2)),
        Cancel(WHY),
        *(MemberLost(member, WHY) for member in (A, B, C)),
        *reports,
        Tick(),
    ]


@pytest.mark.parametrize("now", [NOW, LATE])
@pytest.mark.parametrize("state", list(ProposerState))
def test_a_proposer_takes_every_event_and_speaks_only_what_is_on_disk(state, now):
    for event in every_proposer_event():
        machine = proposer_in(state)
        disk: ProposerRecord = machine.record
        for effect in machine.handle(event, now):
            if isinstance(effect, PersistProposal):
                disk = effect.record
            if isinstance(effect, SendOrder):
                assert effect.order.generation == disk.generation <= disk.highest_generation
                assert effect.order.phase in (disk.phase, Phase.ABORT)
        assert machine.record == disk, f"{event} changed what is not journalled"
        assert len(machine.record.ended) <= 8


CUTOVER_EXAMPLES: list[CutoverEvent] = [
    *(StateRead(level, source_lost=lost) for level in Level for lost in (False, True)),
    CertificateCompared(True),
    CertificateCompared(False),
    ComparisonFailed(WHY),
    *(BarrierPassed(level) for level in Level),
    BarrierFailed(WHY),
    *(DecisionRead(decision) for decision in Decision if decision is not Decision.GO),
    TargetBuilt(),
    TargetBuilt(WHY),
    StoreUnreachable(WHY),
    StoreUnreachable(WHY, gone=True),
    Tick(),
]
WAYS: dict[CutoverState, list[tuple[CutoverEvent, float]]] = {
    CutoverState.READING: [],
    CutoverState.HELD: [(StateRead(Level.EVERYTHING), 2.0)],
    CutoverState.VOTED: [
        (StateRead(Level.EVERYTHING), 2.0),
        (CertificateCompared(True), 2.0),
    ],
    CutoverState.BUILDING: [
        (StateRead(Level.STATE), 2.0),
        (CertificateCompared(True), 2.0),
        (DecisionRead(Decision.GO_REDO), 2.0),
    ],
    CutoverState.DECIDED: [
        (StateRead(Level.EVERYTHING), 2.0),
        (CertificateCompared(True), 2.0),
        (DecisionRead(Decision.NO_GO), 2.0),
    ],
    CutoverState.FELL: [
        (StateRead(Level.NOTHING), 2.0),
        (StoreUnreachable(WHY), LATE),
    ],
}


def cutover_in(state: CutoverState) -> Cutover:
    rescues = state is CutoverState.BUILDING
    machine = Cutover(
        rank=0,
        in_source=True,
        in_target=True,
        deadlines=CutoverDeadlines(),
        boundary=BoundaryAgreed(5),
        now=1.0,
        rescues=rescues,
    )
    for event, now in WAYS[state]:
        machine.handle(event, now)
    assert machine.state is state
    return machine


@pytest.mark.parametrize("now", [NOW, LATE])
@pytest.mark.parametrize("state", list(CutoverState))
def test_a_cutover_takes_every_event_and_steps_only_on_a_decision(state, now):
    for event in CUTOVER_EXAMPLES:
        machine = cutover_in(state)
        if state is CutoverState.DECIDED and event == DecisionRead(Decision.GO_REDO):
            with pytest.raises(AssertionError, match="the decision changed"):
                machine.handle(event, now)
            continue
        effects = machine.handle(event, now)
        ends = (ApplyStepInTarget, RedoBatchInTarget, ApplyStepInSource, Leave)
        if any(isinstance(each, ends) for each in effects):
            decides = isinstance(event, DecisionRead) and state is CutoverState.VOTED
            assert decides or (state is CutoverState.BUILDING and event == TargetBuilt())
        if any(isinstance(each, EnterBarrier) and each.level is not Level.NOTHING for each in effects):
            assert event == CertificateCompared(True)


def test_these_tests_drive_every_pair():
    coverage = Coverage()
    for state in ParticipantState:
        for event in every_participant_event():
            machine = participant_in(state) if state is not ParticipantState.IDLE else participant()
            promise = machine.record.promise
            machine.handle(event, NOW)
            coverage.participant(state, promise, event, machine.state)
            # Without a promise every handoff is another one; the events were driven all the same.
            if isinstance(event, RankReported):
                coverage.pairs["participant", state, f"Rank.{event.stage}"] += 1
    for state in ProposerState:
        for event in every_proposer_event():
            coverage.proposer(state, event)
    for state in CutoverState:
        for event in CUTOVER_EXAMPLES:
            coverage.cutover(state, event)
    assert set(coverage.pairs) == every_pair()
    assert len(every_pair()) == (
        len(ParticipantState) * len(EVENTS)
        + len(ProposerState) * len(PROPOSER_EVENTS)
        + len(CutoverState) * len(CUTOVER_EVENTS)
    )
