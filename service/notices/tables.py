"""Notices, only ever appended: a nearer deadline or a withdrawal is a new row. The same fact reported twice is one.

Rows are deleted when they are old, and where a lease has more of them than it may have.
"""

from datetime import datetime

from sqlalchemy import ForeignKey, Identity, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from agent.protocol.sync import NoticeKind
from service.db.base import Base, JsonList, one_of


class NoticeRow(Base):
    """What became known of a notice about one life of one node. Whether it still counts is derived, never stored.

    `event_id`: of a planned event, else empty; `said_at`: by the cloud, of the newest word on that event, null if not
    known. `first_seen_at` tells a notice from the one before it; `recorded_at` is when the service first heard of it.
    `occurrence_id`: the first of the rows that announce the same loss, whoever said so. `job_ids`: the jobs that the
    node worked for when this row, or one before it of the same notice, was stored, but for what withdraws it.
    `told_in`: only another node of this job has said so, and neither the node itself nor its cloud; null otherwise.
    """

    __tablename__ = "notices"
    __table_args__ = (
        one_of("kind", NoticeKind),
        UniqueConstraint(
            "lease_id",
            "kind",
            "source",
            "event_id",
            "first_seen_at",
            "deadline_at",
            "withdrawn_at",
            name="uq_notices_fact",
            postgresql_nulls_not_distinct=True,
        ),
        Index("ix_notices_occurrence", "occurrence_id"),
        Index("ix_notices_first", "notice_id", postgresql_where="notice_id = occurrence_id"),
        Index("ix_notices_first_recorded", "recorded_at", postgresql_where="notice_id = occurrence_id"),
        Index("ix_notices_first_of_node", "node_id", "notice_id", postgresql_where="notice_id = occurrence_id"),
        Index("ix_notices_newest", "lease_id", "kind", "source", "event_id", "notice_id"),
        Index(
            "ix_notices_first_of_job",
            "job_ids",
            postgresql_using="gin",
            postgresql_ops={"job_ids": "jsonb_path_ops"},
            postgresql_where="notice_id = occurrence_id",
        ),
    )

    notice_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"), index=True)
    lease_id: Mapped[int] = mapped_column(ForeignKey("leases.lease_id"))
    kind: Mapped[str]
    source: Mapped[str]
    event_id: Mapped[str] = mapped_column(default="", server_default="")
    deadline_at: Mapped[datetime | None]
    first_seen_at: Mapped[datetime]
    withdrawn_at: Mapped[datetime | None]
    recorded_at: Mapped[datetime] = mapped_column(index=True)
    raw: Mapped[str]
    said_at: Mapped[datetime | None] = mapped_column(default=None)
    occurrence_id: Mapped[int | None] = mapped_column(default=None)
    job_ids: Mapped[JsonList] = mapped_column(default=list)
    told_in: Mapped[str | None] = mapped_column(default=None)
