"""Tokens: only a hash of the secret is stored."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, one_of


class Role(StrEnum):
    """What a token may do: people and scripts use the REST API, agents only their own surface."""

    ADMIN = "admin"
    SCRIPT = "script"
    AGENT = "agent"


class TokenRow(Base):
    """One bearer token `liver_<token_id>_<secret>`."""

    __tablename__ = "tokens"
    __table_args__ = (one_of("role", Role),)

    token_id: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    name: Mapped[str]
    secret_sha256: Mapped[str]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None] = mapped_column(default=None)
    revoked_at: Mapped[datetime | None] = mapped_column(default=None)
