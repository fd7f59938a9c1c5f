"""Who changed what, and when. Rows are only ever added."""

from datetime import datetime

from sqlalchemy import Identity, Index
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, Json


class AuditRow(Base):
    """One change that somebody asked for, or that the service made by itself. `actor`: the name of the token, which may
    since have been revoked."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_target", "target"),)

    audit_id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    at: Mapped[datetime]
    actor: Mapped[str]
    token_id: Mapped[str]
    role: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    detail: Mapped[Json] = mapped_column(default=dict)
