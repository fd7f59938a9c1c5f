"""Requests for machines, and the machines: request -> instance -> lease -> node.

Today people start machines, and the first report of a node makes both rows. Whoever orders machines from a provider
writes them first, with the provider's id and the time from which the machine is paid.
"""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index
from sqlalchemy.orm import Mapped, mapped_column

from agent.protocol.sync import Provider
from service.db.base import Base, one_of
from service.policy.types import Market


class RequestRow(Base):
    """Machines that somebody asked for: `asked_by` names who. `provider_id`: the provider's own name of the request.
    `market`: how they are sold, null where a person asked; `place`: the zone or pool that a world must lie in, empty
    where any will do. `ended_at`: nothing more will come of it."""

    __tablename__ = "capacity_requests"
    __table_args__ = (
        one_of("provider", Provider),
        CheckConstraint("machines >= 1", name="machines_positive"),
        CheckConstraint("ended_at IS NULL OR ended_at >= asked_at", name="ends_after_it_was_asked"),
        Index("uq_capacity_requests_provider_id", "provider", "provider_id", unique=True,
              postgresql_where="provider_id IS NOT NULL"),
        one_of("market", Market),
        Index("ix_capacity_requests_asked_by", "asked_by", "ended_at", postgresql_where="market IS NOT NULL"),
        Index("ix_capacity_requests_ended", "ended_at", postgresql_where="ended_at IS NOT NULL"),
    )  # fmt: skip

    request_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    provider: Mapped[str]
    pool: Mapped[str]
    machines: Mapped[int]
    asked_by: Mapped[str]
    asked_at: Mapped[datetime]
    provider_id: Mapped[str | None] = mapped_column(default=None)
    market: Mapped[str | None] = mapped_column(default=None)
    place: Mapped[str] = mapped_column(default="", server_default="")
    ended_at: Mapped[datetime | None] = mapped_column(default=None)
    end_reason: Mapped[str] = mapped_column(default="")


class InstanceRow(Base):
    """One machine. `request_id`: null once the request is kept no longer. `node_id`: the name of its node, null until
    its agent has reported. `paid_from`, `paid_until`: null where not known; the machine boots from `paid_from` on.
    `released_at`: it is no machine of ours any more."""

    __tablename__ = "instances"
    __table_args__ = (
        one_of("provider", Provider),
        CheckConstraint("paid_until IS NULL OR paid_until >= paid_from", name="paid_until_after_from"),
        CheckConstraint("released_at IS NULL OR released_at >= known_since", name="released_after_it_was_known"),
        Index("uq_instances_provider_id", "provider", "provider_id", unique=True,
              postgresql_where="provider_id IS NOT NULL AND released_at IS NULL"),
        Index("ix_instances_node", "node_id", "instance_id"),
        Index("uq_instances_present_node", "node_id", unique=True, postgresql_where="released_at IS NULL"),
    )  # fmt: skip

    instance_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    request_id: Mapped[int | None] = mapped_column(
        ForeignKey("capacity_requests.request_id", ondelete="SET NULL"), index=True
    )
    provider: Mapped[str]
    provider_id: Mapped[str | None] = mapped_column(default=None)
    zone: Mapped[str | None] = mapped_column(default=None)
    node_id: Mapped[str | None] = mapped_column(ForeignKey("nodes.node_id"), default=None)
    pool: Mapped[str]
    known_since: Mapped[datetime]
    paid_from: Mapped[datetime | None] = mapped_column(default=None)
    paid_until: Mapped[datetime | None] = mapped_column(default=None)
    released_at: Mapped[datetime | None] = mapped_column(default=None)
