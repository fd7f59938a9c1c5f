"""Which price counts when, for whatever is summed by prices."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.leases.tables import PoolPriceRow

LOCK_PRICES = 0x11FE_0004
"""Shared by whoever cuts what was spent at prices, exclusive to whoever adds a price."""

# Each price counts until the next one of its pool; the first also counts for the time before it, which would cost
# nothing otherwise. An interval is cut where the price changes.
PRICES = """
    prices AS (
         SELECT pool, price_usd_per_hour AS usd, on_demand_usd_per_hour AS on_demand, egress_usd_per_gb,
                CASE WHEN lag(effective_from) OVER by_time IS NULL THEN '-infinity' ELSE effective_from END AS since,
                coalesce(lead(effective_from) OVER by_time, 'infinity') AS until
           FROM pool_prices WINDOW by_time AS (PARTITION BY pool ORDER BY effective_from))
"""


@dataclass(frozen=True, slots=True)
class PriceSpan:
    """The time for which a price that is about to be added counts. `ends`: None for no end. `price_before`: the begin
    of the one that counts there until then, as text."""

    begins: datetime
    ends: datetime | None
    price_before: str


def span_of_new(session: Session, pool: str, effective_from: datetime) -> PriceSpan | None:
    """The time for which such a price of the pool will count, but for the time before the first; None if it is the only
    one, or takes the place of one. Until the end of the transaction nobody else cuts anything at prices."""
    session.execute(select(func.pg_advisory_xact_lock(LOCK_PRICES)))
    prices = select(PoolPriceRow.effective_from).where(PoolPriceRow.pool == pool)
    known = session.scalars(prices.order_by(PoolPriceRow.effective_from)).all()
    if not known or effective_from in known:
        return None
    # The first price also counts for the time before it.
    begins = max(effective_from, known[0])
    before = [at for at in known if at < begins]
    after = [at for at in known if at > begins]
    price_before = before[-1].isoformat() if len(before) > 1 else "-infinity"
    return PriceSpan(begins, after[0] if after else None, price_before)


def share_prices(session: Session) -> None:
    """Nobody adds a price until the end of the transaction."""
    session.execute(select(func.pg_advisory_xact_lock_shared(LOCK_PRICES)))
