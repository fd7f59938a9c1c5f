"""Leases (capacity we hold) and the price list of pools (appended; the price of a moment is the last one before it)."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base


class LeaseRow(Base):
    """One life of one node, from its first sync until it is gone."""

    __tablename__ = "leases"
    __table_args__ = (
        CheckConstraint("ended_at IS NULL OR ended_at >= started_at", name="ends_after_start"),
        Index("uq_leases_open_node", "node_id", unique=True, postgresql_where="ended_at IS NULL"),
        Index("ix_leases_node_started", "node_id", "started_at"),
    )

    lease_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"))
    pool: Mapped[str]
    slots: Mapped[int]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None] = mapped_column(default=None)
    end_reason: Mapped[str] = mapped_column(default="")


class PoolPriceRow(Base):
    """What one node of a pool costs an hour from a moment on."""

    __tablename__ = "pool_prices"
    __table_args__ = (CheckConstraint("price_usd_per_hour >= 0", name="price_not_negative"),)

    pool: Mapped[str] = mapped_column(primary_key=True)
    effective_from: Mapped[datetime] = mapped_column(primary_key=True)
    price_usd_per_hour: Mapped[float]
