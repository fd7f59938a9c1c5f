"""Sums over the ledger: seconds and dollars by cause."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from service.ledger.tables import Cause

# Each price counts until the next one of its pool; the first also counts for the time before it, which would cost
# nothing otherwise. An interval is cut where the price changes. All is computed in decimal numbers.
_PRICES = """
    prices AS (
         SELECT pool, price_usd_per_hour AS usd,
                CASE WHEN lag(effective_from) OVER by_time IS NULL THEN '-infinity' ELSE effective_from END AS since,
                coalesce(lead(effective_from) OVER by_time, 'infinity') AS until
           FROM pool_prices WINDOW by_time AS (PARTITION BY pool ORDER BY effective_from))
"""
_SLICES = f"""
    WITH {_PRICES},
    slices AS (
         SELECT ledger.cause, ledger.job_id, ledger.generation, prices.usd / leases.slots AS usd,
                extract(epoch FROM least(part.upper_end, prices.until) - greatest(part.lower_start, prices.since))
                    AS seconds
           FROM ledger
           JOIN leases ON leases.lease_id = ledger.lease_id
          CROSS JOIN LATERAL (
                SELECT greatest(ledger.starts_at, CAST(:since AS timestamptz)) AS lower_start,
                       least(ledger.ends_at, CAST(:until AS timestamptz)) AS upper_end) AS part
           LEFT JOIN prices ON prices.pool = leases.pool
                           AND prices.since < part.upper_end AND prices.until > part.lower_start
          WHERE (CAST(:job_id AS text) IS NULL OR ledger.job_id = CAST(:job_id AS text))
            AND part.upper_end > part.lower_start)
"""
_SUMMARY = text(
    f"""{_SLICES}
    SELECT cause, sum(seconds) AS slot_seconds, coalesce(sum(seconds * usd), 0) / 3600 AS dollars,
           coalesce(sum(seconds) FILTER (WHERE usd IS NULL), 0) AS unpriced
      FROM slices GROUP BY cause
    """
)
_GENERATIONS = text(
    f"""{_SLICES}
    SELECT generation, cause, sum(seconds) AS slot_seconds, coalesce(sum(seconds * usd), 0) / 3600 AS dollars,
           coalesce(sum(seconds) FILTER (WHERE usd IS NULL), 0) AS unpriced
      FROM slices WHERE generation = ANY(CAST(:generations AS bigint[])) GROUP BY generation, cause
    """
)
_EGRESS = text(
    """
    SELECT coalesce(sum(bytes), 0) AS bytes, sum(bytes * price.usd) / 1000000000 AS dollars,
           count(*) FILTER (WHERE price.usd IS NULL AND bytes > 0) AS unpriced
      FROM ledger_egress
      LEFT JOIN LATERAL (
           SELECT egress_usd_per_gb AS usd FROM pool_prices
            WHERE pool_prices.pool = ledger_egress.pool
            ORDER BY (effective_from <= ledger_egress.at) DESC,
                     CASE WHEN effective_from <= ledger_egress.at THEN effective_from END DESC, effective_from
            LIMIT 1) AS price ON true
     WHERE (CAST(:job_id AS text) IS NULL OR job_id = CAST(:job_id AS text))
       AND at >= coalesce(CAST(:since AS timestamptz), at) AND at < coalesce(CAST(:until AS timestamptz), 'infinity')
    """
)


@dataclass(frozen=True, slots=True)
class CauseSum:
    """Slot seconds and dollars of one cause. `unpriced`: of how many of the seconds no price is known."""

    cause: Cause
    slot_seconds: float
    dollars: float
    unpriced: float = 0.0


@dataclass(frozen=True, slots=True)
class Egress:
    """What left pools. `dollars`: None where the price of some of it is not known."""

    bytes: int
    dollars: float | None


def summary(
    session: Session, *, job_id: str | None = None, since: datetime | None = None, until: datetime | None = None
) -> Sequence[CauseSum]:
    """One sum per cause that occurred, of one job or of everything, clipped to [since, until)."""
    rows = session.execute(_SUMMARY, {"job_id": job_id, "since": since, "until": until}).all()
    found = {row.cause: row for row in rows}
    return [_sum(found[cause]) for cause in Cause if cause in found]


def by_generation(session: Session, job_id: str, generations: Sequence[int]) -> dict[int, list[CauseSum]]:
    """The sums of each of these generations of a job."""
    found: dict[int, list[CauseSum]] = {number: [] for number in generations}
    values = {"job_id": job_id, "since": None, "until": None, "generations": list(generations)}
    for row in session.execute(_GENERATIONS, values):
        found[row.generation].append(_sum(row))
    return found


def egress(
    session: Session, *, job_id: str | None = None, since: datetime | None = None, until: datetime | None = None
) -> Egress:
    """What handoffs moved, of one job or of all."""
    row = session.execute(_EGRESS, {"job_id": job_id, "since": since, "until": until}).one()
    return Egress(int(row.bytes), None if row.unpriced else float(row.dollars or 0))


def _sum(row: Any) -> CauseSum:
    return CauseSum(Cause(row.cause), float(row.slot_seconds), float(row.dollars), float(row.unpriced))


def goodput(sums: Sequence[CauseSum]) -> float | None:
    """Share of the time that was productive; None before there is any time."""
    total = sum(item.slot_seconds for item in sums)
    productive = sum(item.slot_seconds for item in sums if item.cause is Cause.PRODUCTIVE)
    return productive / total if total else None
