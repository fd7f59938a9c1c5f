"""Intervals that have ended are summed: by job and by hour, over all time, and for all jobs together.

What reads the ledger adds these sums up with the intervals that are not in them yet (`rolled` is false), so that no
answer takes longer because a service has run for long. Sums are parts between hours and changes of the price, in whole
microseconds: nothing is rounded. Rows are only added here; `merge` makes those of the same key one.
"""

from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from service.ledger.prices import PRICES, PriceSpan, share_prices
from service.ledger.tables import IntervalRow, KeptRow

HOUR = timedelta(hours=1)
ROLL_AFTER = timedelta(minutes=10)
"""Late reports mostly change what is younger than this, and need not change a sum."""
ROLLED_MAX, HOURS_MAX = 10_000, 200_000
"""Intervals that are summed at a time, and the hours in which they lie: what that takes grows with the latter."""
MERGED_MAX = 20_000
# Of the intervals in sums, those that touch [:begins, :ends). An interval of a chain begins where the one before it
# ends: two looks into the index of each chain find them.
SUMMED_WITHIN = """
    SELECT found.*, leases.pool, leases.slots
      FROM leases CROSS JOIN LATERAL generate_series(0, leases.slots - 1) AS place (slot)
     CROSS JOIN LATERAL (
           SELECT * FROM ledger
            WHERE ledger.lease_id = leases.lease_id AND ledger.slot = place.slot AND rolled
              AND ends_at > CAST(:begins AS timestamptz) AND starts_at < CAST(:ends AS timestamptz)
              AND ends_at <= coalesce((SELECT min(ends_at) FROM ledger AS last
                                        WHERE last.lease_id = leases.lease_id AND last.slot = place.slot
                                          AND last.ends_at >= CAST(:ends AS timestamptz)), 'infinity')) AS found
     WHERE tstzrange(leases.started_at, leases.ended_at) && tstzrange(CAST(:begins AS timestamptz),
                                                                      CAST(:ends AS timestamptz))
"""
_KEY = "job_id, generation, pool, slots, cause, hour, price_from"
# What is of a job counts for all jobs together too, and what is of an hour also for all time.
_COUNTED = f"""
    added AS (
    INSERT INTO ledger_sums ({_KEY}, micros, merged)
    SELECT counts_for.job_id, counts_for.generation, pool, slots, cause, counts_at.hour, price_from, sum(micros),
           false
      FROM parts
     CROSS JOIN LATERAL (SELECT parts.job_id, coalesce(parts.generation, 0) AS generation WHERE parts.job_id IS NOT NULL
                          UNION ALL SELECT '', 0) AS counts_for
     CROSS JOIN LATERAL (VALUES (parts.hour), (CAST('-infinity' AS timestamptz))) AS counts_at (hour)
     GROUP BY 1, 2, 3, 4, 5, 6, 7)
    SELECT count(*) FROM chosen
"""
# What a statement ends with that has `chosen`, rows of the ledger, and `:sign`: it adds their sums, or takes them away.
PARTS = f"""
    {PRICES},
    parts AS (
         SELECT chosen.job_id, chosen.generation, leases.pool, leases.slots, chosen.cause, hours.hour,
                coalesce(prices.since, '-infinity') AS price_from,
                CAST(:sign * 1000000 * extract(epoch FROM
                     least(chosen.ends_at, hours.hour + interval '1 hour', prices.until)
                     - greatest(chosen.starts_at, hours.hour, prices.since)) AS bigint) AS micros
           FROM chosen JOIN leases ON leases.lease_id = chosen.lease_id
          CROSS JOIN LATERAL generate_series(
                date_trunc('hour', chosen.starts_at, 'UTC'), chosen.ends_at - interval '1 microsecond',
                interval '1 hour') AS hours (hour)
           LEFT JOIN prices ON prices.pool = leases.pool
                           AND prices.since < least(chosen.ends_at, hours.hour + interval '1 hour')
                           AND prices.until > greatest(chosen.starts_at, hours.hour)),
    {_COUNTED}
"""
# The last interval of a lease that has not ended still grows.
_ROLL = text(
    f"""
    WITH chosen AS (
         UPDATE ledger SET rolled = true
           FROM (SELECT interval_id, sum(hours) OVER (ORDER BY interval_id) - hours AS hours_before
                   FROM (SELECT ended.interval_id,
                                ceil(extract(epoch FROM ended.ends_at - date_trunc('hour', ended.starts_at, 'UTC'))
                                     / 3600) AS hours
                           FROM ledger AS ended JOIN leases ON leases.lease_id = ended.lease_id
                          WHERE NOT ended.rolled AND ended.ends_at < :before
                            AND (leases.ended_at IS NOT NULL
                                 OR EXISTS (SELECT FROM ledger AS following
                                             WHERE following.lease_id = ended.lease_id AND following.slot = ended.slot
                                               AND following.follows = ended.ends_at))
                          LIMIT :most FOR NO KEY UPDATE OF ended SKIP LOCKED) AS found) AS picked
          WHERE ledger.interval_id = picked.interval_id AND picked.hours_before < :hours_max
         RETURNING ledger.*),
    {PARTS}
    """
)
_TAKE_BACK = text(f"WITH chosen AS (SELECT * FROM ledger WHERE interval_id = :interval_id), {PARTS}")
_MERGE = text(
    f"""
    WITH loose AS (SELECT sum_id, {_KEY} FROM ledger_sums WHERE NOT merged LIMIT :most),
    old AS (DELETE FROM ledger_sums
             WHERE sum_id IN (SELECT sum_id FROM loose
                               UNION SELECT same.sum_id FROM (SELECT DISTINCT {_KEY} FROM loose) AS known
                                       JOIN ledger_sums AS same USING ({_KEY}) WHERE same.merged)
            RETURNING {_KEY}, micros, merged),
    new AS (INSERT INTO ledger_sums ({_KEY}, micros, merged)
            SELECT {_KEY}, sum(micros), true FROM old GROUP BY {_KEY} HAVING sum(micros) <> 0)
    SELECT count(*) FROM old WHERE NOT merged
    """
)
# All rows of whole hours move, those of one job and those of all; the rest of the hour in which the price begins is cut
# out of intervals.
_MOVE = text(
    f"""
    WITH within AS ({SUMMED_WITHIN} AND leases.pool = :pool),
    hours AS (
         SELECT job_id, generation, pool, slots, cause, hour, micros FROM ledger_sums
          WHERE pool = :pool AND price_from = CAST(:old AS timestamptz) AND hour >= CAST(:full_from AS timestamptz)
          UNION ALL
         SELECT counts_for.job_id, counts_for.generation, pool, slots, cause,
                date_trunc('hour', CAST(:begins AS timestamptz), 'UTC'),
                CAST(1000000 * extract(epoch FROM least(ends_at, CAST(:ends AS timestamptz))
                                       - greatest(starts_at, CAST(:begins AS timestamptz))) AS bigint)
           FROM within
          CROSS JOIN LATERAL (SELECT within.job_id, coalesce(within.generation, 0) AS generation
                               WHERE within.job_id IS NOT NULL
                               UNION ALL SELECT '', 0) AS counts_for)
    INSERT INTO ledger_sums ({_KEY}, micros, merged)
    SELECT job_id, generation, pool, slots, cause, counts_at.hour, change.price_from, sum(change.sign * micros), false
      FROM hours
     CROSS JOIN LATERAL (VALUES (hours.hour), (CAST('-infinity' AS timestamptz))) AS counts_at (hour)
     CROSS JOIN (VALUES (-1, CAST(:old AS timestamptz)), (1, CAST(:begins AS timestamptz))) AS change (sign, price_from)
     GROUP BY 1, 2, 3, 4, 5, 6, 7
    """
)

# A chain goes from its begin on: the first interval that stays follows none.
_FORGET = text(
    """
    WITH gone AS (
         DELETE FROM ledger WHERE interval_id IN (
                SELECT interval_id FROM ledger WHERE rolled AND ends_at <= :cut ORDER BY ends_at LIMIT :most)
         RETURNING lease_id, slot, ends_at),
    last AS (SELECT lease_id, slot, max(ends_at) AS ends_at FROM gone GROUP BY lease_id, slot),
    first AS (UPDATE ledger SET follows = NULL FROM last
               WHERE ledger.lease_id = last.lease_id AND ledger.slot = last.slot AND ledger.follows = last.ends_at)
    SELECT count(*) FROM gone
    """
)


def roll(session: Session, *, before: datetime, hours_max: int = HOURS_MAX) -> int:
    """Sum intervals that ended before: at least one, and no further one once they lie in so many hours. Returns how
    many."""
    share_prices(session)
    values = {"before": before, "most": min(ROLLED_MAX, hours_max), "hours_max": hours_max, "sign": 1}
    return session.execute(_ROLL, values).scalar_one()


def merge(session: Session, *, most: int = MERGED_MAX) -> int:
    """Make sums of the same key one, of up to `most` rows. Returns how many were looked at. Only one at a time may do
    it."""
    return session.execute(_MERGE, {"most": most}).scalar_one()


def take_back(session: Session, interval_id: int) -> None:
    """Take an interval out of the sums, as it is in the database: it changes. The caller has locked it."""
    share_prices(session)
    session.execute(_TAKE_BACK, {"interval_id": interval_id, "sign": -1})


def forget(session: Session, *, before: datetime, most: int) -> int:
    """Delete up to `most` intervals that ended before, the oldest first. Their sums stay. Returns how many."""
    cut = hour_of(before)
    unsummed = session.scalars(select(func.min(IntervalRow.ends_at)).where(~IntervalRow.rolled)).one()
    if unsummed is not None:
        cut = min(cut, hour_of(unsummed))
    old = select(IntervalRow.interval_id).where(IntervalRow.rolled, IntervalRow.ends_at <= cut)
    if session.scalars(old.limit(1)).first() is None:
        return 0
    session.execute(update(KeptRow).values(kept_from=func.greatest(KeptRow.kept_from, cut)))
    return session.execute(_FORGET, {"cut": cut, "most": most}).scalar_one()


def cut_at_price(session: Session, pool: str, span: PriceSpan) -> None:
    """Cut the sums of a pool where another price of it is about to begin.

    Raises Unsplittable where that lies within an hour of which only the sum is left.
    """
    check_whole_hours(session, span.begins)
    full_from = hour_from(span.begins)
    values = {
        "pool": pool,
        "begins": span.begins,
        "ends": full_from if span.ends is None else min(full_from, span.ends),
        "full_from": full_from,
        "old": span.price_before,
    }
    session.execute(_MOVE, values)


class Unsplittable(Exception):
    """A time lies within an hour of which only the sum is left."""

    def __init__(self, time: datetime, since: datetime) -> None:
        super().__init__(
            f"must be a full hour, or not before {since:%Y-%m-%d %H:%M} UTC: until then only sums by hour are kept"
        )
        self.time = time


def kept_from(session: Session) -> datetime | None:
    """From when on intervals are kept; None while all are."""
    return session.scalars(select(KeptRow.kept_from)).one()


def check_whole_hours(session: Session, *times: datetime) -> None:
    """Raises Unsplittable for the first that lies within an hour of which only the sum is left."""
    parted = [time for time in times if time != hour_of(time)]
    since = kept_from(session) if parted else None
    for time in parted:
        if since is not None and time < since:
            raise Unsplittable(time, since)


def hour_of(time: datetime) -> datetime:
    """The begin of its hour."""
    return time.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def hour_from(time: datetime) -> datetime:
    """The first full hour from a time on."""
    return hour_of(time + HOUR - timedelta(microseconds=1))
