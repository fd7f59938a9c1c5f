"""Tokens: only a hash of the secret is stored."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import CheckConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, one_of


class Role(StrEnum):
    """What a token may do. The first three are for people and scripts, each may do what the one before it may: read;
    act on jobs, nodes and prices; make and revoke tokens. The others are for agents: `join` makes a node known, and
    gives it a `node key`, which is only good for fetching `node` tokens. These are short-lived, and speak for one node.
    """

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"
    JOIN = "join"
    NODE_KEY = "node_key"
    NODE = "node"


PEOPLE = (Role.VIEWER, Role.OPERATOR, Role.ADMIN)
ISSUED = (*PEOPLE, Role.JOIN)
"""Roles of tokens that an admin makes; the others are made when a node joins."""


class TokenRow(Base):
    """One bearer token `liver_<token_id>_<secret>`. `node_id`: the only node it is good for. `uses_left`: how often a
    join token still works, null without a limit. `created_by`: the id of the token that made it."""

    __tablename__ = "tokens"
    __table_args__ = (
        one_of("role", Role),
        CheckConstraint("node_id IS NOT NULL OR role NOT IN ('node_key', 'node')", name="node_bound"),
        CheckConstraint("uses_left >= 0", name="uses_not_negative"),
        Index("ix_tokens_node_id", "node_id"),
        Index("ix_tokens_working", "created_at", "token_id", postgresql_where="revoked_at IS NULL"),
    )

    token_id: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    name: Mapped[str]
    secret_sha256: Mapped[str]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None] = mapped_column(default=None)
    revoked_at: Mapped[datetime | None] = mapped_column(default=None)
    node_id: Mapped[str | None] = mapped_column(default=None)
    uses_left: Mapped[int | None] = mapped_column(default=None)
    created_by: Mapped[str | None] = mapped_column(default=None)
