"""What a participant tells about itself: a Report made from its record. Pure."""

from dataclasses import dataclass

from liver_core.handoff.messages import Decision, Order, Reason, Report, Stage, WorldStage
from liver_core.handoff.participant_events import ParticipantRecord, ParticipantState
from liver_core.layout import Member

STAGE_OF_STATE = {
    ParticipantState.IDLE: Stage.IDLE,
    ParticipantState.RESTORING: Stage.PREPARING,
    ParticipantState.STOPPING: Stage.PREPARING,
    ParticipantState.PREPARING: Stage.PREPARING,
    ParticipantState.STREAMING: Stage.STREAMING,
    ParticipantState.READY: Stage.READY,
    ParticipantState.PERMITTED: Stage.READY,
    ParticipantState.WITHDRAWING: Stage.PREPARING,
    ParticipantState.ABORTING: Stage.PREPARING,
    ParticipantState.CUTTING_OVER: Stage.CUTTING_OVER,
    ParticipantState.ACTIVE: Stage.ACTIVE,
}
"""What a participant says of itself in each state."""


@dataclass(frozen=True, slots=True)
class Truth:
    """Where `member` is in the handoff that the report is about."""

    member: Member
    stage: Stage
    decision: Decision
    reason: Reason | None


def build_report(
    order: Order, record: ParticipantRecord, truth: Truth, order_key: tuple[int, int], now: float
) -> Report:
    """The report that answers `order`; `order_key` is (agent incarnation, report number)."""
    promise = record.promise
    bound = promise is not None and promise.handoff_id == order.handoff_id
    return Report(
        job_id=order.job_id,
        handoff_id=order.handoff_id,
        parent=order.parent,
        generation=order.generation,
        plan_revision=promise.plan_revision if bound and promise is not None else order.plan_revision,
        plan_digest=order.plan_digest,
        member=truth.member,
        stage=truth.stage,
        stages=_stages(order, record, truth),
        promise=promise,
        active_generation=0 if record.active is None else record.active.generation,
        highest_generation=record.highest_generation,
        decision=truth.decision,
        deadline_utc=order.deadline_utc,
        agent_incarnation=order_key[0],
        report_seq=order_key[1],
        issued_at=now,
        reason=truth.reason,
    )


def _stages(order: Order, record: ParticipantRecord, truth: Truth) -> tuple[WorldStage, ...]:
    """The member's rank in the world it steps in, and in the target world."""
    stages = []
    active = record.active
    rank = None if active is None else active.rank_of(truth.member)
    if active is not None and rank is not None and active.generation != order.generation:
        stages.append(WorldStage(active.generation, rank, Stage.ACTIVE))
    rank = order.target.rank_of(truth.member)
    if rank is not None:
        stages.append(WorldStage(order.generation, rank, truth.stage))
    return tuple(stages)
