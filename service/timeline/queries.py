"""Reads a job's course in a bounded number of points, however long it ran.

Steps are thinned to one point for each part of the span. Costs come from the ledger: from its intervals for a short
span, from its sums by hour for a long one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session, defer

from service.handoffs.tables import HandoffRow
from service.jobs.tables import GenerationRow, JobRow, SourceKind
from service.ledger.prices import PRICES
from service.ledger.sums import HOUR, hour_from, hour_of

FINE_MAX = timedelta(hours=6)
"""A longer span is told by the hour."""
FINE_BUCKETS, HOURS_MAX = 240, 24 * 90
MARKS_MAX = 500

_POINTS = text(
    """
    SELECT DISTINCT ON (part) part, finished_at AS at, step, generation, seconds, loss,
           sum(tokens) OVER same / nullif(sum(seconds) FILTER (WHERE tokens IS NOT NULL) OVER same, 0) AS tokens_per_s,
           count(*) OVER same AS steps
      FROM (SELECT *, floor(extract(epoch FROM finished_at - :since) / :width_s) AS part FROM steps
             WHERE job_id = :job_id AND finished_at >= :since AND finished_at <= :until) AS parted
    WINDOW same AS (PARTITION BY part)
     ORDER BY part, finished_at DESC, step DESC
    """
)
_OPEN_LEASES = """
    SELECT leases.* FROM leases
     WHERE started_at < CAST(:until AS timestamptz)
       AND (ended_at IS NULL OR ended_at > CAST(:since AS timestamptz))
"""
_FINE = text(
    f"""
    WITH {PRICES},
    found AS (
         SELECT ledger.cause, leases.pool, leases.slots, greatest(ledger.starts_at, :since) AS starts_at,
                least(ledger.ends_at, :until) AS ends_at
           FROM ({_OPEN_LEASES}) AS leases
          CROSS JOIN LATERAL generate_series(0, leases.slots - 1) AS place (slot)
          CROSS JOIN LATERAL (
                SELECT * FROM ledger
                 WHERE ledger.lease_id = leases.lease_id AND ledger.slot = place.slot
                   AND ledger.ends_at > :since AND ledger.starts_at < :until) AS ledger
          WHERE ledger.job_id = :job_id),
    buckets AS (
         SELECT number, :since + number * CAST(:width AS interval) AS since,
                :since + (number + 1) * CAST(:width AS interval) AS until
           FROM generate_series(0, :buckets - 1) AS number)
    SELECT buckets.number, found.cause, sum(extract(epoch FROM cut.until - cut.since)) AS slot_seconds,
           coalesce(sum(extract(epoch FROM cut.until - cut.since) * prices.usd / found.slots), 0) / 3600 AS dollars
      FROM found
      LEFT JOIN prices ON prices.pool = found.pool AND prices.since < found.ends_at AND prices.until > found.starts_at
      JOIN buckets ON buckets.since < found.ends_at AND buckets.until > found.starts_at
     CROSS JOIN LATERAL (
           SELECT greatest(found.starts_at, buckets.since, coalesce(prices.since, found.starts_at)) AS since,
                  least(found.ends_at, buckets.until, coalesce(prices.until, found.ends_at)) AS until) AS cut
     WHERE cut.until > cut.since
     GROUP BY 1, 2
    """
)
# What is summed by the hour, and what is in no sum yet.
_BY_HOUR = text(
    f"""
    WITH {PRICES},
    hours AS (SELECT at AS since, at + interval '1 hour' AS until
                FROM generate_series(CAST(:since AS timestamptz),
                                     CAST(:until AS timestamptz) - interval '1 microsecond', interval '1 hour') AS at),
    parts AS (
         SELECT ledger_sums.hour, ledger_sums.cause, ledger_sums.slots, prices.usd, ledger_sums.micros / 1000000.0 AS s
           FROM ledger_sums LEFT JOIN prices ON prices.pool = ledger_sums.pool AND prices.since = ledger_sums.price_from
          WHERE ledger_sums.job_id = :job_id AND ledger_sums.hour >= :since AND ledger_sums.hour < :until
          UNION ALL
         SELECT hours.since, ledger.cause, leases.slots, prices.usd,
                extract(epoch FROM least(ledger.ends_at, hours.until, coalesce(prices.until, 'infinity'))
                                   - greatest(ledger.starts_at, hours.since, coalesce(prices.since, '-infinity')))
           FROM ledger JOIN leases USING (lease_id)
           JOIN hours ON hours.since < ledger.ends_at AND hours.until > ledger.starts_at
           LEFT JOIN prices ON prices.pool = leases.pool
                AND prices.since < least(ledger.ends_at, hours.until)
                AND prices.until > greatest(ledger.starts_at, hours.since)
          WHERE NOT ledger.rolled AND ledger.job_id = :job_id)
    SELECT hour, cause, sum(s) AS slot_seconds, coalesce(sum(s * usd / slots), 0) / 3600 AS dollars
      FROM parts GROUP BY 1, 2
    """
)


@dataclass(slots=True)
class Spending:
    """What a part of the span was spent on, by cause."""

    starts_at: datetime
    ends_at: datetime
    slot_seconds: dict[str, float]
    dollars: dict[str, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to the job: a handoff, or a start. Either row is there."""

    at: datetime
    handoff: HandoffRow | None = None
    start: GenerationRow | None = None


def points_of(session: Session, job_id: str, since: datetime, until: datetime, points: int) -> Sequence[Any]:
    """At most so many steps: of each part of the span, the last one, with the mean pace of all of them."""
    width_s = max((until - since).total_seconds() / points, 1e-3)
    values = {"job_id": job_id, "since": since, "until": until, "width_s": width_s}
    return session.execute(_POINTS, values).all()[-points:]


def buckets_of(session: Session, job_id: str, since: datetime, until: datetime) -> list[Spending]:
    """The span in equal parts that it fills; hours for a long one, of which the newest count."""
    if until - since <= FINE_MAX:
        width = max((until - since) / FINE_BUCKETS, timedelta(seconds=1))
        number = max(1, -(-(until - since) // width))
        found = [
            Spending(since + place * width, min(until, since + (place + 1) * width), {}, {}) for place in range(number)
        ]
        values = {"job_id": job_id, "since": since, "until": until, "width": width, "buckets": number}
        for row in session.execute(_FINE, values):
            found[row.number].slot_seconds[row.cause] = float(row.slot_seconds)
            found[row.number].dollars[row.cause] = float(row.dollars)
        return found
    first, end = max(hour_of(since), hour_from(until) - HOURS_MAX * HOUR), hour_from(until)
    found = [
        Spending(first + place * HOUR, first + (place + 1) * HOUR, {}, {}) for place in range((end - first) // HOUR)
    ]
    for row in session.execute(_BY_HOUR, {"job_id": job_id, "since": first, "until": end}):
        bucket = found[(row.hour - first) // HOUR]
        bucket.slot_seconds[row.cause] = float(row.slot_seconds)
        bucket.dollars[row.cause] = float(row.dollars)
    return found


def marks_of(session: Session, job_id: str, since: datetime, until: datetime) -> list[Mark]:
    """Handoffs and starts within the span, the newest so many, oldest first."""
    handoffs = (
        select(HandoffRow)
        .where(HandoffRow.job_id == job_id, HandoffRow.opened_at >= since, HandoffRow.opened_at <= until)
        .order_by(HandoffRow.opened_at.desc())
        .limit(MARKS_MAX)
    )
    starts = (
        select(GenerationRow)
        .options(defer(GenerationRow.roster))
        .where(GenerationRow.job_id == job_id, GenerationRow.source_kind != SourceKind.HANDOFF)
        .where(GenerationRow.created_at >= since, GenerationRow.created_at <= until)
        .order_by(GenerationRow.generation.desc())
        .limit(MARKS_MAX)
    )
    found = [Mark(row.changed_at, handoff=row) for row in session.scalars(handoffs)]
    found += [Mark(row.created_at, start=row) for row in session.scalars(starts)]
    return sorted(found, key=lambda mark: mark.at)[-MARKS_MAX:]


def span_of(job: JobRow, since: datetime | None, until: datetime | None, now: datetime) -> tuple[datetime, datetime]:
    """From the job's begin to its end, or to now, where nothing else is asked for."""
    ended = job.state_changed_at if job.due_at is None else now
    first = since or job.created_at
    last = max(until or max(ended, job.last_step_at or ended), first + timedelta(seconds=1))
    return first, last
