"""Reads of leases and prices."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from sqlalchemy import bindparam, select
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import Session, aliased

from service.leases.tables import LeaseRow, PoolPriceRow
from service.paging import Pages

_OPEN = select(LeaseRow).where(LeaseRow.node_id == bindparam("node_id"), LeaseRow.ended_at.is_(None))


def open_lease(session: Session, node_id: str) -> LeaseRow | None:
    """The node's open lease."""
    return session.scalars(_OPEN, {"node_id": node_id}).one_or_none()


def lease_since(session: Session, node_id: str, at: datetime) -> LeaseRow | None:
    """The node's open lease, or else its last one if that ended after `at`."""
    last = select(LeaseRow).where(LeaseRow.node_id == node_id).order_by(LeaseRow.lease_id.desc()).limit(1)
    lease = session.scalars(last).one_or_none()
    return lease if lease is not None and (lease.ended_at is None or lease.ended_at > at) else None


def list_leases(session: Session, pages: Pages, *, node_id: str | None = None) -> Sequence[LeaseRow]:
    """All or a node's, newest first, also those that have ended."""
    statement = select(LeaseRow)
    if node_id is not None:
        statement = statement.where(LeaseRow.node_id == node_id)
    return pages.newest(session, statement, LeaseRow.lease_id)


def price_of(session: Session, pool: str, *, now: datetime) -> PoolPriceRow | None:
    """What a node of the pool costs at `now`."""
    prices = select(PoolPriceRow).where(PoolPriceRow.pool == pool, PoolPriceRow.effective_from <= now)
    return session.scalars(prices.order_by(PoolPriceRow.effective_from.desc()).limit(1)).one_or_none()


def current_prices(session: Session, pages: Pages, *, now: datetime) -> Iterator[PoolPriceRow]:
    """The price of each pool at `now`, by pool, read as they are asked for."""
    newest = (
        select(PoolPriceRow)
        .where(PoolPriceRow.effective_from <= now)
        .ext(distinct_on(PoolPriceRow.pool))
        .order_by(PoolPriceRow.pool, PoolPriceRow.effective_from.desc())
    )
    price = aliased(PoolPriceRow, newest.subquery())
    return pages.oldest(session, select(price), price.pool)


def prices_of(session: Session, pages: Pages, pool: str) -> Sequence[PoolPriceRow]:
    """All prices of a pool, the latest first."""
    statement = select(PoolPriceRow).where(PoolPriceRow.pool == pool)
    return pages.newest(session, statement, PoolPriceRow.effective_from)
