"""One row per handoff attempt. The proposer makes the id, so the service can store it later."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import JSON, CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from agent.protocol.values import HandoffCause, HandoffState
from liver_core.handoff import Decision, Rung
from service.db.base import Base, Json, JsonList, one_of

DECLINED = "declined"
"""The phase of the reason of a proposal that an agent did not open."""


class HandoffRow(Base):
    """`generation` is null until an agent has opened the handoff: only opening burns a number. `ended_by`: the first
    cause of an attempt that failed, final once an agent has named it. `why`: what it is for, in words; `reason`: what
    became of it."""

    __tablename__ = "handoffs"
    __table_args__ = (
        one_of("state", HandoffState),
        one_of("cause", HandoffCause),
        one_of("rung", Rung),
        one_of("decision", Decision),
        CheckConstraint("generation IS NULL OR generation > parent", name="generation_above_parent"),
        CheckConstraint(
            "generation IS NOT NULL OR state IN ('proposed', 'aborted', 'broken')", name="opened_has_generation"
        ),
        UniqueConstraint("job_id", "generation"),
        Index(
            "ix_handoffs_open",
            "job_id",
            postgresql_where="state IN ('proposed', 'preparing', 'streaming', 'ready', 'cutting_over')",
        ),
        Index("ix_handoffs_failed", "changed_at", postgresql_where="state IN ('aborted', 'broken')"),
        Index("ix_handoffs_opened", "opened_at", "handoff_id"),
        Index("ix_handoffs_state_opened", "state", "opened_at", "handoff_id"),
        Index("ix_handoffs_job_opened", "job_id", "opened_at", "handoff_id"),
    )

    handoff_id: Mapped[UUID] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"))
    parent: Mapped[int]
    generation: Mapped[int | None]
    plan_revision: Mapped[int] = mapped_column(default=1)
    plan_digest: Mapped[str] = mapped_column(default="")
    mirror_seq: Mapped[int] = mapped_column(default=-1)
    proposer: Mapped[str]
    cause: Mapped[str]
    state: Mapped[str]
    stage: Mapped[str] = mapped_column(default="")
    rung: Mapped[str]
    source: Mapped[Json | None]
    target: Mapped[Json]
    source_layout: Mapped[str] = mapped_column(default="")
    target_layout: Mapped[str]
    leaving: Mapped[JsonList] = mapped_column(default=list)
    decision: Mapped[str | None] = mapped_column(default=None)
    superseded: Mapped[bool] = mapped_column(default=False)
    why: Mapped[str] = mapped_column(default="")
    reason: Mapped[str] = mapped_column(default="")
    reason_detail: Mapped[Json | None] = mapped_column(default=None)
    ended_by: Mapped[Json | None] = mapped_column(default=None)
    opened_at: Mapped[datetime]
    deadline_at: Mapped[datetime | None] = mapped_column(default=None)
    changed_at: Mapped[datetime]
    recorded_at: Mapped[datetime]
    # JSON, not JSONB: it keeps the phases in the order in which they happened.
    measures: Mapped[Json] = mapped_column(JSON, default=dict)
    pause_charged_s: Mapped[float] = mapped_column(default=0.0)
