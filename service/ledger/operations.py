"""Writes the ledger, always inside the transaction that stores the fact it accounts for."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import bindparam, select, text
from sqlalchemy.orm import Session

from service.leases.tables import LeaseRow
from service.ledger.tables import Cause, IntervalRow

_TAIL = (
    select(IntervalRow)
    .where(IntervalRow.lease_id == bindparam("lease_id"), IntervalRow.slot == bindparam("slot"))
    .order_by(IntervalRow.ends_at.desc())
    .limit(1)
    .with_for_update(key_share=True)
)
# Tails are locked in the order of slots: a lateral subquery runs once for each row of the list, one after the other.
_GROW = text(
    """
    WITH tail AS MATERIALIZED (
         SELECT last.interval_id
           FROM unnest(CAST(:causes AS text[]), CAST(:job_ids AS text[]), CAST(:generations AS bigint[]))
                WITH ORDINALITY AS spent (cause, job_id, generation, place)
          CROSS JOIN LATERAL (
                SELECT * FROM ledger WHERE lease_id = :lease_id AND slot = spent.place - 1
                 ORDER BY ends_at DESC LIMIT 1 FOR NO KEY UPDATE) AS last
          WHERE last.ends_at < :until AND last.cause = spent.cause
            AND last.job_id IS NOT DISTINCT FROM spent.job_id
            AND last.generation IS NOT DISTINCT FROM spent.generation)
    UPDATE ledger SET ends_at = :until FROM tail WHERE ledger.interval_id = tail.interval_id
    RETURNING ledger.slot
    """
)


@dataclass(frozen=True, slots=True)
class Spent:
    """What the time up to now was spent on."""

    cause: Cause
    job_id: str | None = None
    generation: int | None = None


def account_all(session: Session, *, lease: LeaseRow, until: datetime, spent: Sequence[Spent]) -> None:
    """`account` for each slot of a lease, from slot 0 on. Intervals that only grow (nearly all) share one statement."""
    values = {
        "lease_id": lease.lease_id,
        "until": until,
        "causes": [item.cause.value for item in spent],
        "job_ids": [item.job_id for item in spent],
        "generations": [item.generation for item in spent],
    }
    grown = set(session.execute(_GROW, values).scalars())
    for slot, item in enumerate(spent):
        if slot not in grown:
            account(session, lease=lease, slot=slot, until=until, spent=item)


def account(session: Session, *, lease: LeaseRow, slot: int, until: datetime, spent: Spent) -> None:
    """Continue the slot's chain up to `until`: grow its last interval if that has the same cause, else append one."""
    tail = _tail(session, lease_id=lease.lease_id, slot=slot)
    starts_at = tail.ends_at if tail else lease.started_at
    if until <= starts_at:
        return
    if tail is not None and (tail.cause, tail.job_id, tail.generation) == (spent.cause, spent.job_id, spent.generation):
        tail.ends_at = until
        return
    session.add(
        IntervalRow(
            lease_id=lease.lease_id,
            slot=slot,
            follows=tail.ends_at if tail else None,
            starts_at=starts_at,
            ends_at=until,
            cause=spent.cause,
            job_id=spent.job_id,
            generation=spent.generation,
        )
    )
    session.flush()


def charge_last_seconds(session: Session, *, lease: LeaseRow, slot: int, seconds: float, cause: Cause) -> bool:
    """Give the last `seconds` of a slot's productive time another cause; False if its last interval is not productive.

    Used for a handoff's measured pause: its length is exact, its position is the time at which it was reported.
    """
    tail = _tail(session, lease_id=lease.lease_id, slot=slot)
    if tail is None or tail.cause != Cause.PRODUCTIVE or seconds <= 0:
        return False
    ends_at, cut = tail.ends_at, tail.ends_at - timedelta(seconds=seconds)
    if cut <= tail.starts_at:
        tail.cause = cause
        return True
    tail.ends_at = cut
    session.flush()
    session.add(
        IntervalRow(
            lease_id=lease.lease_id,
            slot=slot,
            follows=cut,
            starts_at=cut,
            ends_at=ends_at,
            cause=cause,
            job_id=tail.job_id,
            generation=tail.generation,
        )
    )
    session.flush()
    return True


def _tail(session: Session, *, lease_id: int, slot: int) -> IntervalRow | None:
    return session.scalars(_TAIL, {"lease_id": lease_id, "slot": slot}).one_or_none()
