"""Sums over the ledger: seconds and dollars by cause."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from service.ledger.prices import PRICES
from service.ledger.sums import SUMMED_WITHIN, check_whole_hours, hour_from, hour_of
from service.ledger.tables import Cause

ALL_TIME_ENDS = "0001-01-01T00:00:00Z"
"""Before it there is only the sum of all time."""


# Intervals that are in no sum yet; the sums of whole hours, or of all time; and the intervals of hours that lie only
# partly in the time asked for. All is computed in decimal numbers.
_SLICES = f"""
    WITH {PRICES},
    raw AS (
         SELECT cause, generation, pool, slots, greatest(starts_at, CAST(:since AS timestamptz)) AS starts_at,
                least(ends_at, CAST(:until AS timestamptz)) AS ends_at
           FROM ledger JOIN leases USING (lease_id)
          WHERE NOT rolled AND (CAST(:job_id AS text) IS NULL OR job_id = CAST(:job_id AS text))
          {{edges}}),
    slices AS (
         SELECT raw.cause, raw.generation, prices.usd, prices.on_demand, raw.slots,
                CAST(1000000 * extract(epoch FROM least(raw.ends_at, prices.until)
                                       - greatest(raw.starts_at, prices.since)) AS bigint) AS micros
           FROM raw LEFT JOIN prices ON prices.pool = raw.pool
                                    AND prices.since < raw.ends_at AND prices.until > raw.starts_at
          WHERE raw.ends_at > raw.starts_at
          UNION ALL
         SELECT ledger_sums.cause, ledger_sums.generation, prices.usd, prices.on_demand, ledger_sums.slots,
                ledger_sums.micros
           FROM ledger_sums LEFT JOIN prices ON prices.pool = ledger_sums.pool AND prices.since = ledger_sums.price_from
          WHERE ledger_sums.job_id = coalesce(CAST(:job_id AS text), '')
            AND ledger_sums.hour >= CAST(:first_hour AS timestamptz)
            AND ledger_sums.hour < CAST(:end_hour AS timestamptz)),
    exact AS (
         SELECT {{by}}, sum(micros) AS micros, sum(micros * usd) / slots AS paid,
                sum(micros) FILTER (WHERE usd IS NULL) AS unpriced, sum(micros * (on_demand - usd)) / slots AS saved,
                sum(micros) FILTER (WHERE on_demand IS NULL OR usd IS NULL) AS uncompared
           FROM slices WHERE {{where}} GROUP BY {{by}}, slots),
    sums AS (
         SELECT {{by}}, sum(micros) * 0.000001 AS slot_seconds, coalesce(sum(paid), 0) / 3600000000 AS dollars,
                coalesce(sum(unpriced), 0) * 0.000001 AS unpriced, coalesce(sum(saved), 0) / 3600000000 AS saved,
                coalesce(sum(uncompared), 0) * 0.000001 AS uncompared
           FROM exact GROUP BY {{by}})
    SELECT * FROM sums WHERE slot_seconds > 0
"""
_EDGE = f"""
    SELECT cause, generation, pool, slots, greatest(starts_at, CAST(:begins AS timestamptz)),
           least(ends_at, CAST(:ends AS timestamptz))
      FROM ({SUMMED_WITHIN}) AS within
     WHERE CAST(:job_id AS text) IS NULL OR job_id = CAST(:job_id AS text)
"""
# As for intervals: rows that are in no sum yet, sums of whole hours or of all time, and the rows of hours that lie only
# partly in the time asked for.
_EGRESS = f"""
    WITH {PRICES},
    raw AS (
         SELECT pool, at, bytes FROM ledger_egress
          WHERE NOT rolled AND at >= coalesce(CAST(:since AS timestamptz), '-infinity')
            AND at < coalesce(CAST(:until AS timestamptz), 'infinity')
            AND (CAST(:job_id AS text) IS NULL OR job_id = CAST(:job_id AS text))
          {{edges}}),
    moved AS (
         SELECT raw.bytes, prices.egress_usd_per_gb AS usd
           FROM raw LEFT JOIN prices ON prices.pool = raw.pool AND prices.since <= raw.at AND raw.at < prices.until
          UNION ALL
         SELECT sums.bytes, prices.egress_usd_per_gb
           FROM ledger_egress_sums AS sums
           LEFT JOIN prices ON prices.pool = sums.pool AND prices.since = sums.price_from
          WHERE sums.job_id = coalesce(CAST(:job_id AS text), '')
            AND sums.hour >= CAST(:first_hour AS timestamptz) AND sums.hour < CAST(:end_hour AS timestamptz))
    SELECT coalesce(sum(bytes), 0) AS bytes, sum(bytes * usd) / 1000000000 AS dollars,
           coalesce(sum(bytes) FILTER (WHERE usd IS NULL), 0) > 0 AS unpriced
      FROM moved
"""
_EGRESS_EDGE = """
    SELECT pool, at, bytes FROM ledger_egress
     WHERE rolled AND at >= CAST(:begins AS timestamptz) AND at < CAST(:ends AS timestamptz)
       AND (CAST(:job_id AS text) IS NULL OR job_id = CAST(:job_id AS text))
"""


@dataclass(frozen=True, slots=True)
class CauseSum:
    """Slot seconds and dollars of one cause. `unpriced`: of how many of the seconds no price is known. `saved`: dollars
    that the rest would have cost more on demand; `uncompared`: seconds of which one of the two prices is not known."""

    cause: Cause
    slot_seconds: float
    dollars: float
    unpriced: float = 0.0
    saved: float = 0.0
    uncompared: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Which sums make up a time: those of hours from `first_hour` to `end_hour`, both as text, and what lies in hours
    that are only partly in it."""

    first_hour: str
    end_hour: str
    edges: tuple[tuple[datetime, datetime], ...]

    def values(self) -> dict[str, str | datetime]:
        """As parameters of a query."""
        hours: dict[str, str | datetime] = {"first_hour": self.first_hour, "end_hour": self.end_hour}
        for number, (begins, ends) in enumerate(self.edges):
            hours |= {f"begins_{number}": begins, f"ends_{number}": ends}
        return hours


@dataclass(frozen=True, slots=True)
class Egress:
    """What left pools. `dollars`: None where the price of some of it is not known."""

    bytes: int
    dollars: float | None


def summary(
    session: Session, *, job_id: str | None = None, since: datetime | None = None, until: datetime | None = None
) -> Sequence[CauseSum]:
    """One sum per cause that occurred, of one job or of everything, clipped to [since, until).

    Raises Unsplittable where one of them lies within an hour of which only the sum is left.
    """
    check_whole_hours(session, *(time for time in (since, until) if time is not None))
    span = whole_hours(since, until)
    values = {"job_id": job_id, "since": since, "until": until} | span.values()
    found = {row.cause: row for row in session.execute(_sums_of("cause", len(span.edges)), values)}
    return [_sum(found[cause]) for cause in Cause if cause in found]


def whole_hours(since: datetime | None, until: datetime | None) -> Span:
    """Without limits, the sums of all time, which stand at -infinity."""
    if since is None and until is None:
        return Span("-infinity", ALL_TIME_ENDS, ())
    first = None if since is None else hour_from(since)
    end = None if until is None else hour_of(until)
    if since is not None and until is not None and first is not None and end is not None and first > end:
        # Both lie within one hour.
        return Span(ALL_TIME_ENDS, ALL_TIME_ENDS, ((since, until),) if since < until else ())
    edges = []
    if since is not None and first is not None and since < first:
        edges.append((since, first))
    if until is not None and end is not None and end < until:
        edges.append((end, until))
    return Span(
        ALL_TIME_ENDS if first is None else first.isoformat(),
        "infinity" if end is None else end.isoformat(),
        tuple(edges),
    )


@cache
def _sums_of(by: str, edges: int, where: str = "true") -> TextClause:
    return text(_SLICES.format(by=by, where=where, edges=_for_each(_EDGE, edges)))


@cache
def _egress_with(edges: int) -> TextClause:
    return text(_EGRESS.format(edges=_for_each(_EGRESS_EDGE, edges)))


def _for_each(edge: str, edges: int) -> str:
    numbered = (
        edge.replace(":begins", f":begins_{number}").replace(":ends", f":ends_{number}") for number in range(edges)
    )
    return "".join(f" UNION ALL {each}" for each in numbered)


def by_generation(session: Session, job_id: str, generations: Sequence[int]) -> dict[int, list[CauseSum]]:
    """The sums of each of these generations of a job."""
    found: dict[int, list[CauseSum]] = {number: [] for number in generations}
    values = {"job_id": job_id, "since": None, "until": None, "generations": list(generations)}
    values |= whole_hours(None, None).values()
    for row in session.execute(
        _sums_of("generation, cause", 0, "generation = ANY(CAST(:generations AS bigint[]))"), values
    ):
        found[row.generation].append(_sum(row))
    return found


def egress(
    session: Session, *, job_id: str | None = None, since: datetime | None = None, until: datetime | None = None
) -> Egress:
    """What handoffs moved, of one job or of all."""
    span = whole_hours(since, until)
    values = {"job_id": job_id, "since": since, "until": until} | span.values()
    row = session.execute(_egress_with(len(span.edges)), values).one()
    return Egress(int(row.bytes), None if row.unpriced else float(row.dollars or 0))


def _sum(row: Any) -> CauseSum:
    numbers = (row.slot_seconds, row.dollars, row.unpriced, row.saved, row.uncompared)
    return CauseSum(Cause(row.cause), *map(float, numbers))


INTERRUPTIONS = (Cause.PAUSE, Cause.RECOMPUTE, Cause.LOST, Cause.FALLBACK_RESTART)
"""What slots do because nodes came or went, and bought nothing with. Newcomers that start are not among it."""


def interruptions_usd(sums: Sequence[CauseSum], moved: Egress) -> float:
    """What interruptions cost: the slots, and what was moved over the network, as far as its price is known."""
    return sum(item.dollars for item in sums if item.cause in INTERRUPTIONS) + (moved.dollars or 0.0)


def saved_usd(sums: Sequence[CauseSum]) -> float | None:
    """What was paid less than on demand; None where no price on demand is known."""
    compared = sum(item.slot_seconds - item.uncompared for item in sums)
    return sum(item.saved for item in sums) if compared > 0 else None


def goodput(sums: Sequence[CauseSum]) -> float | None:
    """Share of the time that was productive; None before there is any time."""
    total = sum(item.slot_seconds for item in sums)
    productive = sum(item.slot_seconds for item in sums if item.cause is Cause.PRODUCTIVE)
    return productive / total if total else None
