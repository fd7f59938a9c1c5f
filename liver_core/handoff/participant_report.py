"""What a participant keeps, and what it tells about itself: its record, and the reports made from that. Pure."""

from dataclasses import dataclass, replace

from liver_core.handoff.messages import (
    OUT_OF_TIME,
    Decision,
    Order,
    Promise,
    Reason,
    Report,
    Stage,
    WorldStage,
)
from liver_core.handoff.participant_events import (
    ENDED_MAX,
    MAY_SHOW_TAG,
    EndedHandoff,
    ParticipantEffect,
    ParticipantRecord,
    ParticipantState,
    Persist,
    SendReport,
    SetReadyTag,
    StopRank,
)
from liver_core.handoff.ready_tag import ready_tag
from liver_core.layout import Member

STAGE_OF_STATE = {
    ParticipantState.IDLE: Stage.IDLE,
    ParticipantState.RESTORING: Stage.PREPARING,
    ParticipantState.REPLACED: Stage.IDLE,
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


class RecordKeeper:
    """The half of a participant that changes its record and speaks of it."""

    def __init__(self, *, job_id: str, member: Member, agent_incarnation: int, record: ParticipantRecord) -> None:
        self.job_id = job_id
        self.member = member
        self.agent_incarnation = agent_incarnation
        self.record = record
        self.state = ParticipantState.IDLE
        self._report_seq = 0
        # Why the ranks took the next rung. Not journalled: the rank reports it again to a restarted agent.
        self._fallback: Reason | None = None

    def _end(
        self, stage: Stage, reason: Reason, now: float, *, decision: Decision = Decision.UNDECIDED
    ) -> tuple[ParticipantEffect, ...]:
        """The handoff is over here. The world in which the rank trains stays as it is."""
        self.state, order = ParticipantState.IDLE, self.record.order
        self.record = replace(self.record, decision=decision)
        self._end_record(stage, reason)
        return (Persist(self.record), self._report_of(order, stage, reason, decision, now))

    def _lose_rank(
        self, stage: Stage, reason: Reason, now: float, *, decision: Decision = Decision.UNDECIDED
    ) -> tuple[ParticipantEffect, ...]:
        """The handoff is over here, and this member runs no rank any more."""
        self.record = replace(self.record, active=None)
        persist, report = self._end(stage, reason, now, decision=decision)
        return (persist, StopRank(reason), report)

    def _set_tag(self, promise: Promise) -> SetReadyTag:
        handoff_id, revision = promise.handoff_id, promise.plan_revision
        return SetReadyTag(handoff_id, revision, ready_tag(handoff_id, revision))

    def _end_record(self, stage: Stage, reason: Reason | None) -> None:
        promise, order = self.record.promise, self.record.order
        assert promise is not None
        ended = EndedHandoff(
            promise.handoff_id,
            promise.generation,
            promise.plan_revision,
            stage,
            self.record.decision,
            reason,
            proposer_id=None if order is None else order.proposer_id,
        )
        self.record = replace(
            self.record,
            promise=None,
            order=None,
            reason=reason,
            decision=Decision.UNDECIDED,
            ended=(*self.record.ended[-(ENDED_MAX - 1) :], ended),
        )

    def _persist(self, **changes: object) -> Persist:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        return Persist(self.record)

    def _ended(self, order: Order) -> EndedHandoff | None:
        """How the attempt of this order ended here. Another lead's of the same name and number is another attempt."""
        attempt, leads = (order.handoff_id, order.generation), (order.proposer_id, None)
        found = (each for each in self.record.ended if (each.handoff_id, each.generation) == attempt)
        return next((each for each in found if each.proposer_id in leads), None)

    def _refuse(self, order: Order, reason: Reason | None, now: float) -> SendReport:
        return self._report_of(order, Stage.ABORTED, reason, Decision.UNDECIDED, now)

    def _report(self, now: float, refusal: Reason | None = None) -> SendReport:
        """The truth about the promised handoff. `refusal`: why the order that this report answers is rejected."""
        stage = STAGE_OF_STATE[self.state]
        reason = refusal or self.record.reason or (self._fallback if stage is Stage.READY else None)
        return self._report_of(self.record.order, stage, reason, self.record.decision, now)

    def _report_of(
        self, order: Order | None, stage: Stage, reason: Reason | None, decision: Decision, now: float
    ) -> SendReport:
        assert order is not None, "a report answers an order"
        self._report_seq += 1
        truth, key = Truth(self.member, stage, decision, reason), (self.agent_incarnation, self._report_seq)
        return SendReport(order.proposer_id, build_report(order, self.record, truth, key, now))

    def _because(self, phase: str, text: str) -> Reason:
        world = self.record.active or (self.record.order.target if self.record.order is not None else None)
        return Reason(text, phase, rank=None if world is None else world.rank_of(self.member))

    def _late(self) -> Reason:
        """Why the deadline passed before the boundary. A member that was ready just waited for it, also where it has
        been told meanwhile to be ready no more."""
        text = "the deadline passed before the boundary"
        is_ready = STAGE_OF_STATE[self.state] is Stage.READY or self.state in MAY_SHOW_TAG
        return Reason(text, OUT_OF_TIME) if is_ready else self._because(self.state, f"timed out: {text}")
