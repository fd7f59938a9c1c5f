"""Notices, only ever appended. The same announcement reported twice is one row; a changed deadline is a new row."""

from datetime import datetime

from sqlalchemy import ForeignKey, Identity, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from agent.protocol.sync import NoticeKind
from service.db.base import Base, one_of


class NoticeRow(Base):
    """One announcement about one life of one node. Whether it is still open is derived, never stored."""

    __tablename__ = "notices"
    __table_args__ = (
        one_of("kind", NoticeKind),
        UniqueConstraint("lease_id", "kind", "deadline_at", postgresql_nulls_not_distinct=True),
    )

    notice_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"), index=True)
    lease_id: Mapped[int] = mapped_column(ForeignKey("leases.lease_id"))
    kind: Mapped[str]
    source: Mapped[str]
    deadline_at: Mapped[datetime | None]
    first_seen_at: Mapped[datetime]
    recorded_at: Mapped[datetime] = mapped_column(index=True)
    raw: Mapped[str]
