"""Incidents without a notice: what went wrong with a job although nobody had announced it."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, Identity, Index
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, one_of


class IncidentKind(StrEnum):
    """A world was lost; a world made no step although its ranks lived; checkpoints failed."""

    LOSS = "loss"
    HANG = "hang"
    CHECKPOINT = "checkpoint"


class JobIncidentRow(Base):
    """One of them. While it is open, what goes wrong again in the same way is counted in `times`, and `generation`,
    `step`, `rank`, `node_id` and `reason` are of the last time. `lost_steps`: by all of them."""

    __tablename__ = "job_incidents"
    __table_args__ = (
        one_of("kind", IncidentKind),
        Index("ix_job_incidents_of_job", "job_id", "incident_id"),
        Index("ix_job_incidents_open", "job_id", "kind", unique=True, postgresql_where="over_at IS NULL"),
    )

    incident_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"))
    kind: Mapped[str]
    reason: Mapped[str]
    began_at: Mapped[datetime]
    last_at: Mapped[datetime]
    over_at: Mapped[datetime | None] = mapped_column(default=None)
    times: Mapped[int] = mapped_column(default=1)
    lost_steps: Mapped[int] = mapped_column(default=0)
    generation: Mapped[int | None] = mapped_column(default=None)
    step: Mapped[int | None] = mapped_column(default=None)
    node_id: Mapped[str | None] = mapped_column(default=None)
    rank: Mapped[int | None] = mapped_column(default=None)
