"""Reads of leases and prices."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.leases.tables import LeaseRow, PoolPriceRow


def open_lease(session: Session, node_id: str) -> LeaseRow | None:
    """The lease of a node's present life."""
    statement = select(LeaseRow).where(LeaseRow.node_id == node_id, LeaseRow.ended_at.is_(None))
    return session.scalars(statement).one_or_none()


def current_prices(session: Session, *, now: datetime) -> Sequence[PoolPriceRow]:
    """The price of each pool at `now`."""
    statement = (
        select(PoolPriceRow)
        .where(PoolPriceRow.effective_from <= now)
        .distinct(PoolPriceRow.pool)
        .order_by(PoolPriceRow.pool, PoolPriceRow.effective_from.desc())
    )
    return session.scalars(statement).all()
