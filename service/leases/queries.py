"""Reads of leases and prices."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from service.leases.tables import LeaseRow, PoolPriceRow

_OPEN = select(LeaseRow).where(LeaseRow.node_id == bindparam("node_id"), LeaseRow.ended_at.is_(None))


def open_lease(session: Session, node_id: str) -> LeaseRow | None:
    """The node's open lease."""
    return session.scalars(_OPEN, {"node_id": node_id}).one_or_none()


def current_prices(session: Session, *, now: datetime) -> Sequence[PoolPriceRow]:
    """The price of each pool at `now`."""
    statement = (
        select(PoolPriceRow)
        .where(PoolPriceRow.effective_from <= now)
        .distinct(PoolPriceRow.pool)
        .order_by(PoolPriceRow.pool, PoolPriceRow.effective_from.desc())
    )
    return session.scalars(statement).all()
