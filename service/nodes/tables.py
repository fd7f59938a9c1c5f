"""Nodes with the last report of each, and every start of an agent, so that reports of older starts are rejected."""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from agent.protocol.sync import Provider
from service.db.base import Base, Json, JsonList, one_of


class NodeState(StrEnum):
    """Ready: syncing. Silent: missed several syncs, nothing new is placed on it. Gone: its lease is over."""

    READY = "ready"
    SILENT = "silent"
    GONE = "gone"


class NodeRow(Base):
    """One node by the name its agent gives. `answered_at`: when another agent last reached its machine, while the
    service did not hear its agent. `tried_at`: when its agent last sent a report that the service did not take, for a
    reason of the service's own. `excused_until`: it fell silent together with many others, and does not count as lost
    before. `clock_ahead_s`: how far its clock is ahead of the database's, as last confirmed at `clock_at`.
    `provider_id`: of its machine, as the agent says and as was accepted; null while that is not known."""

    __tablename__ = "nodes"
    __table_args__ = (
        one_of("state", NodeState),
        one_of("provider", Provider),
        CheckConstraint("slots BETWEEN 1 AND 1024", name="slots_bounded"),
        CheckConstraint("report_seq >= 0", name="report_seq_not_negative"),
        Index("ix_nodes_live_last_seen", "last_seen_at", postgresql_where="state <> 'gone'"),
    )

    node_id: Mapped[str] = mapped_column(primary_key=True)
    provider: Mapped[str]
    pool: Mapped[str]
    slots: Mapped[int]
    peer_url: Mapped[str]
    private_address: Mapped[str]
    device: Mapped[str]
    job_user: Mapped[str | None] = mapped_column(default=None)
    agent_version: Mapped[str]
    agent_incarnation: Mapped[UUID]
    report_seq: Mapped[int]
    state: Mapped[str]
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    answered_at: Mapped[datetime | None] = mapped_column(default=None)
    tried_at: Mapped[datetime | None] = mapped_column(default=None)
    excused_until: Mapped[datetime | None] = mapped_column(default=None)
    clock_ahead_s: Mapped[float | None] = mapped_column(default=None)
    clock_at: Mapped[datetime | None] = mapped_column(default=None)
    ranks: Mapped[JsonList] = mapped_column(default=list)
    notice_source: Mapped[Json | None] = mapped_column(default=None)
    provider_id: Mapped[str | None] = mapped_column(default=None)
    zone: Mapped[str | None] = mapped_column(default=None)


class IncarnationRow(Base):
    """One start of one agent. A report of an earlier start than the current one is rejected."""

    __tablename__ = "agent_incarnations"

    incarnation: Mapped[UUID] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"), index=True)
    first_seen_at: Mapped[datetime]
