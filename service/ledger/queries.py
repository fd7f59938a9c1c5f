"""Sums over the ledger: seconds and dollars by cause."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

from service.ledger.tables import Cause

# The price of an interval is the last one set for its pool before it began; a pool without a price costs nothing.
# The first price of a pool also counts for the time before it, which would cost nothing otherwise.
_SUMMARY = text(
    """
    SELECT ledger.cause,
           sum(extract(epoch FROM upper_end - lower_start)) AS slot_seconds,
           sum(extract(epoch FROM upper_end - lower_start) / 3600 / leases.slots * coalesce(price.usd, 0)) AS dollars
      FROM ledger
      JOIN leases ON leases.lease_id = ledger.lease_id
     CROSS JOIN LATERAL (
           SELECT greatest(ledger.starts_at, coalesce(CAST(:since AS timestamptz), ledger.starts_at)) AS lower_start,
                  least(ledger.ends_at, coalesce(CAST(:until AS timestamptz), ledger.ends_at)) AS upper_end) AS part
      LEFT JOIN LATERAL (
           SELECT price_usd_per_hour AS usd FROM pool_prices
            WHERE pool_prices.pool = leases.pool
            ORDER BY (effective_from <= ledger.starts_at) DESC,
                     CASE WHEN effective_from <= ledger.starts_at THEN effective_from END DESC, effective_from
            LIMIT 1) AS price ON true
     WHERE (CAST(:job_id AS text) IS NULL OR ledger.job_id = CAST(:job_id AS text))
       AND upper_end > lower_start
     GROUP BY ledger.cause
    """
)


@dataclass(frozen=True, slots=True)
class CauseSum:
    """Slot seconds and dollars of one cause."""

    cause: Cause
    slot_seconds: float
    dollars: float


def summary(
    session: Session, *, job_id: str | None = None, since: datetime | None = None, until: datetime | None = None
) -> Sequence[CauseSum]:
    """One sum per cause that occurred, of one job or of everything, clipped to [since, until)."""
    rows = session.execute(_SUMMARY, {"job_id": job_id, "since": since, "until": until}).all()
    found = {row.cause: row for row in rows}
    return [
        CauseSum(cause, float(found[cause].slot_seconds), float(found[cause].dollars))
        for cause in Cause
        if cause in found
    ]


def goodput(sums: Sequence[CauseSum]) -> float | None:
    """Share of the time that was productive; None before there is any time."""
    total = sum(item.slot_seconds for item in sums)
    productive = sum(item.slot_seconds for item in sums if item.cause is Cause.PRODUCTIVE)
    return productive / total if total else None
