"""What the channels of the clouds told, what was done with it, how often, and whether each can be asked."""

from datetime import datetime

from sqlalchemy import ForeignKey, Identity, Index
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from agent.protocol.sync import Provider
from service.clouds.cloud_facts import Disposition
from service.db.base import Base, Claimed, one_of


class HearingRow(Base):
    """One message of one channel about one machine, or one that nobody could read; also what an agent heard itself.
    `said_at`: by the cloud, null if it does not say. `lease_id`, `node_id`: null if it is about none. `occurrence_id`:
    of the notice that followed. `raw`: as received, cut."""

    __tablename__ = "notice_hearings"
    __table_args__ = (
        one_of("provider", Provider),
        one_of("disposition", Disposition),
        Index(
            "uq_notice_hearings_message",
            "channel",
            "message_id",
            "provider_id",
            unique=True,
            postgresql_nulls_not_distinct=True,
        ),
        Index("ix_notice_hearings_node", "node_id", "channel", "hearing_id"),
        Index("ix_notice_hearings_heard", "heard_at"),
        Index("ix_notice_hearings_occurrence", "occurrence_id"),
    )

    hearing_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    channel: Mapped[str]
    message_id: Mapped[str]
    provider: Mapped[str | None] = mapped_column(default=None)
    provider_id: Mapped[str | None] = mapped_column(default=None)
    node_id: Mapped[str | None] = mapped_column(ForeignKey("nodes.node_id"), default=None)
    lease_id: Mapped[int | None] = mapped_column(ForeignKey("leases.lease_id"), default=None)
    occurrence_id: Mapped[int | None] = mapped_column(default=None)
    kind: Mapped[str] = mapped_column(default="")
    said_at: Mapped[datetime | None] = mapped_column(default=None)
    deadline_at: Mapped[datetime | None] = mapped_column(default=None)
    heard_at: Mapped[datetime]
    disposition: Mapped[str]
    reason: Mapped[str]
    raw: Mapped[str]


class HearingCountRow(Base):
    """How often a channel said what was treated so. What is foreign is only counted; `example` is the last of it."""

    __tablename__ = "notice_hearing_counts"
    __table_args__ = (one_of("disposition", Disposition),)

    channel: Mapped[str] = mapped_column(primary_key=True)
    disposition: Mapped[str] = mapped_column(primary_key=True)
    heard: Mapped[int]
    last_at: Mapped[datetime]
    example: Mapped[str]


class ChannelRow(Base):
    """A channel of an account. `ok_at`: when a replica last asked it with success. `trouble`: why one could not, last
    at `trouble_at` and since `trouble_since`; it is over where `ok_at` is later."""

    __tablename__ = "cloud_channels"
    __table_args__ = (one_of("provider", Provider),)

    channel: Mapped[str] = mapped_column(primary_key=True)
    provider: Mapped[str]
    ok_at: Mapped[datetime | None] = mapped_column(default=None)
    trouble: Mapped[str] = mapped_column(default="")
    trouble_at: Mapped[datetime | None] = mapped_column(default=None)
    trouble_since: Mapped[datetime | None] = mapped_column(default=None)


class HookRow(Claimed, Base):
    """An Auto Scaling group that waits with the end of a machine of ours. `due_at`: when to look again, null when it is
    over. `heartbeats`: how often it was asked to wait longer. `reason`: what was done last, and why."""

    __tablename__ = "termination_hooks"
    __table_args__ = (Index("ix_termination_hooks_due", "due_at", postgresql_where="due_at IS NOT NULL"),)

    token: Mapped[str] = mapped_column(primary_key=True)
    group_name: Mapped[str]
    hook_name: Mapped[str]
    provider_id: Mapped[str]
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"))
    lease_id: Mapped[int | None] = mapped_column(ForeignKey("leases.lease_id"), default=None)
    heard_at: Mapped[datetime]
    beat_at: Mapped[datetime | None] = mapped_column(default=None)
    heartbeats: Mapped[int] = mapped_column(default=0)
    due_at: Mapped[datetime | None]
    reason: Mapped[str] = mapped_column(default="")


class OperationCursorRow(Claimed, Base):
    """How far the list of operations of a project was read. `inserted_until`: by the cloud's clock, null at first.
    `recent`: time and id of those read of the last minutes, which are read again. `due_at`: when to ask next."""

    __tablename__ = "operation_cursors"

    project: Mapped[str] = mapped_column(primary_key=True)
    inserted_until: Mapped[datetime | None] = mapped_column(default=None)
    recent: Mapped[list[str]] = mapped_column(JSONB(none_as_null=True))
    due_at: Mapped[datetime]
