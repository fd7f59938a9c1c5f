"""Answers by the key that the caller chose. A row is stored in the transaction of the change that it answers."""

from datetime import datetime

from sqlalchemy import LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base


class AnswerRow(Base):
    """One change and what was answered. `body`: null where the answer may not be stored, since it holds a secret, and
    while the change is being made."""

    __tablename__ = "answers"

    token_id: Mapped[str] = mapped_column(primary_key=True)
    key_sha256: Mapped[str] = mapped_column(primary_key=True)
    request_sha256: Mapped[str]
    status: Mapped[int | None] = mapped_column(default=None)
    body: Mapped[bytes | None] = mapped_column(LargeBinary, default=None)
    answered_at: Mapped[datetime] = mapped_column(index=True)
