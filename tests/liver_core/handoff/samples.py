"""Small values that the tests of the handoff share. Pure."""

from dataclasses import replace
from typing import Any

from liver_core.handoff import (
    CutoverDeadlines,
    HandoffId,
    Order,
    Participant,
    ParticipantRecord,
    Phase,
    Proposal,
    Proposer,
    ProposerRecord,
    Reason,
    Rung,
    StoreAddress,
    start_order,
)
from liver_core.handoff.participant_events import (
    OrderReceived,
    ParticipantEffect,
    ParticipantEvent,
    ParticipantState,
    RankDied,
    RankReported,
    RankStage,
    SendReport,
    StartReceived,
    Tick,
    WorldReplaced,
)
from liver_core.layout import Member, ParallelLayout, Roster

A, B, C = Member("a", 0), Member("b", 0), Member("c", 0)
H1, H2 = HandoffId("h1"), HandoffId("h2")
DEADLINE = 100.0
WHY = Reason("because", "test", rank=0)


def roster(generation: int, *members: Member) -> Roster:
    return Roster("job", generation, ParallelLayout(dp=len(members)), members)


G1 = roster(1, A, B)


def order(phase: Phase = Phase.PREPARE, **changes: object) -> Order:
    """Generation 1 on a and b goes to generation 2 on a and c: a survives, b leaves, c is new."""
    generation = changes.get("generation", 2)
    assert isinstance(generation, int)
    first = Order(
        job_id="job",
        handoff_id=H1,
        parent=1,
        generation=generation,
        plan_revision=1,
        plan_digest="d1",
        phase=phase,
        source=G1,
        target=roster(generation, A, C),
        target_revision=1,
        store=StoreAddress("127.0.0.1", 4000),
        cause="notice",
        rung=Rung.STOP_AND_COPY,
        deadline_utc=DEADLINE,
        cutover=CutoverDeadlines(),
        proposer_id="lead",
        agent_incarnation=1,
        report_seq=1,
        issued_at=1.0,
        reason=WHY if phase is Phase.ABORT else None,
    )
    return replace(first, **changes)  # type: ignore[arg-type]


STARTED = 100_001
"""The first generation of the job's second start."""


def start(*members: Member, generation: int = STARTED, name: str = "s1") -> Order:
    """The service starts the job again, on a and c where no others are given."""
    target = roster(generation, *(members or (A, C)))
    store = StoreAddress("127.0.0.1", 4001)
    return start_order(
        target, store, name, deadline_utc=DEADLINE, issued_at=1.0, proposer_id="a", cause="checkpoint", checkpoint="s5"
    )


def proposal(**changes: object) -> Proposal:
    first = Proposal(
        handoff_id=H1,
        job_id="job",
        parent=1,
        source=G1,
        layout=ParallelLayout(dp=2),
        members=(A, C),
        plan_digest="d1",
        store=StoreAddress("127.0.0.1", 4000),
        cause="notice",
        rung=Rung.STOP_AND_COPY,
        deadline_utc=DEADLINE,
        cutover=CutoverDeadlines(),
    )
    return replace(first, **changes)  # type: ignore[arg-type]


def participant(member: Member = A, record: ParticipantRecord | None = None) -> Any:
    """A Participant (untyped: tests look into effects of any kind); members of generation 1 step in it."""
    if record is None:
        record = ParticipantRecord(active=G1 if member in G1.members else None, highest_generation=1)
    return Participant(job_id="job", member=member, agent_incarnation=1, record=record)


def proposer(record: ProposerRecord | None = None) -> Any:
    """A Proposer, untyped for the same reason."""
    record = record or ProposerRecord(highest_generation=1)
    return Proposer(job_id="job", proposer_id="lead", agent_incarnation=1, record=record)


def rank_says(stage: RankStage, **changes: object) -> RankReported:
    return replace(RankReported(H1, 1, stage, plan_revision=1), **changes)  # type: ignore[arg-type]


def participant_in(state: ParticipantState, member: Member = A) -> Any:
    """A participant that went the usual way to `state`."""
    machine = participant(member)
    if state is ParticipantState.RESTORING:
        machine.handle(OrderReceived(order()), 1.0)
        machine = participant(member, machine.record)
        machine.start(2.0)
        return machine
    if state is ParticipantState.WITHDRAWING:
        machine = participant_in(ParticipantState.PERMITTED, member)
        machine.handle(rank_says(RankStage.READY), 1.0)
        machine.handle(OrderReceived(order(Phase.WITHDRAW)), 2.0)
        return machine
    if state is ParticipantState.REPLACED:
        machine.handle(OrderReceived(order()), 1.0)
        machine.handle(WorldReplaced(STARTED), 2.0)
        return machine
    steps = {
        ParticipantState.PREPARING: OrderReceived(order()),
        ParticipantState.STREAMING: rank_says(RankStage.STREAMING),
        ParticipantState.READY: rank_says(RankStage.PREPARED),
        ParticipantState.PERMITTED: OrderReceived(order(Phase.PERMIT)),
        ParticipantState.CUTTING_OVER: rank_says(RankStage.CUTTING_OVER),
        ParticipantState.ACTIVE: rank_says(RankStage.ACTIVE),
    }
    if state is ParticipantState.ABORTING:
        machine.handle(OrderReceived(order()), 1.0)
        machine.handle(OrderReceived(order(Phase.ABORT)), 2.0)
        return machine
    for reached, event in steps.items():
        if machine.state is state:
            break
        machine.handle(event, 1.0)
        assert machine.state is reached
    return machine


def every_participant_event() -> list[ParticipantEvent]:
    """Own, older, newer and foreign orders of every phase; starts; the rank saying everything; death; time."""
    orders = [order(phase) for phase in Phase]
    orders += [order(phase, plan_revision=2, plan_digest="d2") for phase in Phase]
    orders += [order(phase, handoff_id=H2, generation=3) for phase in Phase]
    orders += [order(phase, job_id="other") for phase in Phase]
    stages = [stage for stage in RankStage if stage is RankStage.TRAINING or stage.is_of_handoff]
    said = [rank_says(stage) for stage in stages]
    said += [rank_says(stage, plan_revision=7) for stage in stages]
    said += [rank_says(stage, handoff_id=H2) for stage in stages]
    said += [rank_says(RankStage.TRAINING, handoff_id=HandoffId(""), generation=g) for g in (0, 1, 2)]
    starts = [start(), start(B, C), start(generation=2), replace(start(), job_id="other")]
    replaced = [WorldReplaced(generation) for generation in (1, 2, STARTED)]
    return [*map(OrderReceived, orders), *map(StartReceived, starts), *replaced, *said, RankDied(WHY), Tick()]


def reports_in(effects: tuple[ParticipantEffect, ...]) -> list[Any]:
    """The reports among effects; untyped, since a test says by its assertions what it expects in them."""
    return [effect.report for effect in effects if isinstance(effect, SendReport)]
