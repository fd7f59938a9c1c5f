"""Opens and ends leases, appends prices."""

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from service.leases.queries import open_lease
from service.leases.tables import LeaseRow, PoolPriceRow

LOCK_POOLS = 0x11FE_0003


def ensure_lease(session: Session, *, node_id: str, pool: str, slots: int, now: datetime) -> LeaseRow:
    """The node's open lease. Opens a new one if it has none, or if it came back with other slots or in another pool."""
    lease = open_lease(session, node_id)
    if lease is not None and (lease.pool, lease.slots) == (pool, slots):
        return lease
    if lease is not None:
        end_lease(lease, now=now, reason=f"the node came back with {slots} slots in pool {pool}")
        session.flush()
    lease = LeaseRow(node_id=node_id, pool=pool, slots=slots, started_at=now)
    session.add(lease)
    session.flush()
    return lease


def end_lease(lease: LeaseRow, *, now: datetime, reason: str) -> None:
    """End the lease; a second call changes nothing."""
    if lease.ended_at is None:
        lease.ended_at = max(now, lease.started_at)
        lease.end_reason = reason


def lock_pool(session: Session, pool: str) -> None:
    """Until the end of the transaction nobody else sets a price of this pool: each knows the one before."""
    session.execute(select(func.pg_advisory_xact_lock(LOCK_POOLS, func.hashtext(pool))))


def set_price(session: Session, *, pool: str, price_usd_per_hour: float, effective_from: datetime) -> None:
    """Append a price; a second price for the same moment replaces the first."""
    statement = insert(PoolPriceRow).values(
        pool=pool, price_usd_per_hour=price_usd_per_hour, effective_from=effective_from
    )
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["pool", "effective_from"], set_={"price_usd_per_hour": price_usd_per_hour}
        )
    )
