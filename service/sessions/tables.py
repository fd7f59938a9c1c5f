"""Browser sessions: only a hash of the cookie is stored."""

from datetime import datetime

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base


class BrowserSessionRow(Base):
    """One login of one browser. It ends with its token; the row is deleted when it ends earlier, or soon after."""

    __tablename__ = "browser_sessions"
    __table_args__ = (
        Index("ix_browser_sessions_token", "token_id", "created_at"),
        Index("ix_browser_sessions_expires", "expires_at"),
    )

    secret_sha256: Mapped[str] = mapped_column(primary_key=True)
    token_id: Mapped[str] = mapped_column(ForeignKey("tokens.token_id", ondelete="CASCADE"))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
