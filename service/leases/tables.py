"""Leases (time for which we hold a machine as a node) and the price list of pools (appended; the price of a moment is
the last one before it)."""

from datetime import datetime
from decimal import Decimal

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, Numeric, text
from sqlalchemy.dialects.postgresql import ExcludeConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, Json


class LeaseRow(Base):
    """One life of one node, from the time for which its machine is paid, or else its first report, until it is gone.
    When it ends, each of its slots has a chain of intervals in the ledger from begin to end. `pauses_due`: seconds of
    measured pauses, by `slot/job`, for which the ledger has found no time yet."""

    __tablename__ = "leases"
    __table_args__ = (
        CheckConstraint("ended_at IS NULL OR ended_at >= started_at", name="ends_after_start"),
        ExcludeConstraint(
            (text("int8range(instance_id, instance_id, '[]')"), "&&"),
            (text("tstzrange(started_at, ended_at)"), "&&"),
            name="ex_leases_overlap",
        ),
        Index("uq_leases_open_node", "node_id", unique=True, postgresql_where="ended_at IS NULL"),
        Index("ix_leases_node_started", "node_id", "started_at"),
        Index("ix_leases_ended", "ended_at", postgresql_where="ended_at IS NOT NULL"),
    )

    lease_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"))
    instance_id: Mapped[int] = mapped_column(ForeignKey("instances.instance_id"))
    pool: Mapped[str]
    slots: Mapped[int]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None] = mapped_column(default=None)
    end_reason: Mapped[str] = mapped_column(default="")
    pauses_due: Mapped[Json] = mapped_column(default=dict)


class PoolPriceRow(Base):
    """What one node of a pool costs an hour from a moment on, and what a gigabyte (10^9 bytes) costs that leaves it,
    and what such a node would cost on demand; null where that is not known."""

    __tablename__ = "pool_prices"
    __table_args__ = (
        CheckConstraint("price_usd_per_hour >= 0", name="price_not_negative"),
        CheckConstraint("egress_usd_per_gb >= 0", name="egress_not_negative"),
        CheckConstraint("on_demand_usd_per_hour >= 0", name="on_demand_not_negative"),
    )

    pool: Mapped[str] = mapped_column(primary_key=True)
    effective_from: Mapped[datetime] = mapped_column(primary_key=True)
    price_usd_per_hour: Mapped[Decimal] = mapped_column(Numeric())
    egress_usd_per_gb: Mapped[Decimal | None] = mapped_column(Numeric(), default=None)
    on_demand_usd_per_hour: Mapped[Decimal | None] = mapped_column(Numeric(), default=None)
