"""Decisions, only ever appended, and only where one differs from the one before. Old ones are dropped."""

from datetime import datetime

from sqlalchemy import ForeignKey, Identity, Index
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, Json, JsonList


class DecisionRow(Base):
    """One decision. `action`: what was done; `verdict`: what the planner wanted; `layout`, `nodes`: where.
    `inputs`: what it was made from, nodes that are alike as one; `options`: the numbers of nodes that were weighed.
    `alerts`: what a person should know. `wanted`: what the job should have, by its policy; null where it has none, or
    where nothing could be weighed. `what_sha256`: by which the next one differs or not."""

    __tablename__ = "decisions"
    __table_args__ = (Index("ix_decisions_job", "job_id", "decision_id"),)

    decision_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"))
    decided_at: Mapped[datetime]
    action: Mapped[str]
    reason: Mapped[str]
    asked_by: Mapped[str]
    verdict: Mapped[str]
    verdict_reason: Mapped[str]
    layout: Mapped[str | None]
    nodes: Mapped[JsonList]
    alternatives: Mapped[JsonList]
    inputs: Mapped[Json] = mapped_column(default=dict)
    options: Mapped[JsonList] = mapped_column(default=list)
    alerts: Mapped[JsonList] = mapped_column(default=list)
    wanted: Mapped[Json | None] = mapped_column(default=None)
    inputs_digest: Mapped[str]
    what_sha256: Mapped[str]
