"""The ledger. Intervals of a (lease, slot) tile time: each starts exactly where the one before it ends. And what left
pools over the network.

The database enforces the chain without btree_gist: `follows` refers to the end of the interval before.
"""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Identity, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Base, one_of


class Cause(StrEnum):
    """What a slot's time was spent on."""

    PRODUCTIVE = "productive"
    BOOTSTRAP = "bootstrap"
    PAUSE = "pause"
    RECOMPUTE = "recompute"
    IDLE = "idle"
    LOST = "lost"
    STALLED = "stalled"
    FALLBACK_RESTART = "fallback_restart"


class IntervalRow(Base):
    """One interval of one slot. Only the last of a chain may still grow. `job_id`: also of a job that was
    deleted since. `rolled`: it is in the sums, and is taken out of them before it changes."""

    __tablename__ = "ledger"
    __table_args__ = (
        one_of("cause", Cause),
        CheckConstraint("ends_at > starts_at", name="not_empty"),
        CheckConstraint("follows IS NULL OR follows = starts_at", name="starts_where_it_follows"),
        UniqueConstraint("lease_id", "slot", "ends_at"),
        UniqueConstraint("lease_id", "slot", "follows"),
        Index("uq_ledger_first", "lease_id", "slot", unique=True, postgresql_where="follows IS NULL"),
        ForeignKeyConstraint(
            ["lease_id", "slot", "follows"],
            ["ledger.lease_id", "ledger.slot", "ledger.ends_at"],
            name="fk_ledger_follows",
            deferrable=True,
            initially="DEFERRED",
        ),
        Index("ix_ledger_unrolled", "job_id", postgresql_where="NOT rolled"),
        Index("ix_ledger_rolled", "ends_at", postgresql_where="rolled"),
    )

    interval_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    lease_id: Mapped[int] = mapped_column(ForeignKey("leases.lease_id"))
    slot: Mapped[int]
    follows: Mapped[datetime | None]
    starts_at: Mapped[datetime]
    ends_at: Mapped[datetime]
    cause: Mapped[str]
    job_id: Mapped[str | None]
    generation: Mapped[int | None]
    rolled: Mapped[bool] = mapped_column(default=False)


class SumRow(Base):
    """Slot time of intervals that have ended, in microseconds; several rows of one key add up. `job_id`: empty for all
    slots together, also those without a job. `generation`: 0 for none. `hour`: its begin; -infinity for all time.
    `price_from`: when the price of the pool begins that counts; -infinity for the first one, and where there is none.
    `merged`: there is no other row of this key that is merged."""

    __tablename__ = "ledger_sums"
    __table_args__ = (
        one_of("cause", Cause),
        Index("ix_ledger_sums_job", "job_id", "hour"),
        Index("ix_ledger_sums_pool", "pool", "hour"),
        Index("ix_ledger_sums_loose", "sum_id", postgresql_where="NOT merged"),
    )

    sum_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[str]
    generation: Mapped[int]
    pool: Mapped[str]
    slots: Mapped[int]
    cause: Mapped[str]
    hour: Mapped[datetime]
    price_from: Mapped[datetime]
    micros: Mapped[int]
    merged: Mapped[bool]


class KeptRow(Base):
    """The one row that says from when on intervals are kept; before, there are only their sums. Null: all are kept."""

    __tablename__ = "ledger_kept"
    __table_args__ = (CheckConstraint("place = 1", name="one_row"),)

    place: Mapped[int] = mapped_column(primary_key=True, default=1, autoincrement=False)
    kept_from: Mapped[datetime | None] = mapped_column(default=None)


class EgressRow(Base):
    """What a handoff moved from its source to its target. `pool`: which all nodes of the source belong to, and whose
    price at `at` counts; null where they belong to several. `job_id`: also of a job that was deleted since. `rolled`:
    it is in the sums, and is taken out of them before it changes."""

    __tablename__ = "ledger_egress"
    __table_args__ = (
        CheckConstraint("bytes >= 0", name="bytes_not_negative"),
        Index("ix_ledger_egress_job", "job_id", "at"),
        Index("ix_ledger_egress_at", "at"),
        Index("ix_ledger_egress_unrolled", "at", postgresql_where="NOT rolled"),
    )

    handoff_id: Mapped[UUID] = mapped_column(primary_key=True)
    job_id: Mapped[str]
    pool: Mapped[str | None]
    bytes: Mapped[int]
    at: Mapped[datetime]
    rolled: Mapped[bool] = mapped_column(default=False)


class EgressSumRow(Base):
    """Bytes that handoffs moved. `job_id`, `hour`, `price_from`: as in `SumRow`. `pool`: empty where the nodes of a
    source belonged to several."""

    __tablename__ = "ledger_egress_sums"

    job_id: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(primary_key=True)
    price_from: Mapped[datetime] = mapped_column(primary_key=True)
    bytes: Mapped[int]
