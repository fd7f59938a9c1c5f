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
_TAILS = (
    select(IntervalRow)
    .from_statement(
        text(
            """
            SELECT last.*
              FROM unnest(CAST(:slots AS bigint[])) AS wanted (slot)
             CROSS JOIN LATERAL (
                   SELECT * FROM ledger WHERE lease_id = :lease_id AND slot = wanted.slot
                    ORDER BY ends_at DESC LIMIT 1 FOR NO KEY UPDATE) AS last
            """
        )
    )
    .execution_options(populate_existing=True)
)
_BEFORE = select(IntervalRow).where(
    IntervalRow.lease_id == bindparam("lease_id"),
    IntervalRow.slot == bindparam("slot"),
    IntervalRow.ends_at == bindparam("ends_at"),
)
_WORKED = (Cause.PRODUCTIVE, Cause.RECOMPUTE, Cause.BOOTSTRAP)
INTERVALS_BACK_MAX = 64
"""How far back a pause is looked for: intervals of one slot."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What the time up to now was spent on."""

    cause: Cause
    job_id: str | None = None
    generation: int | None = None


def account_all(session: Session, *, lease: LeaseRow, until: datetime, spent: Sequence[Spent]) -> None:
    """Continue the chain of each slot of a lease, from slot 0 on, up to `until`. Intervals that only grow (nearly all)
    share one statement, and so do those that begin."""
    values = {
        "lease_id": lease.lease_id,
        "until": until,
        "causes": [item.cause.value for item in spent],
        "job_ids": [item.job_id for item in spent],
        "generations": [item.generation for item in spent],
    }
    grown = set(session.execute(_GROW, values).scalars())
    rest = [slot for slot in range(len(spent)) if slot not in grown]
    if not rest:
        return
    tails = {row.slot: row for row in session.scalars(_TAILS, {"lease_id": lease.lease_id, "slots": rest})}
    for slot in rest:
        _continue(session, tails.get(slot), lease=lease, slot=slot, until=until, spent=spent[slot])
    session.flush()


def charge_pause(session: Session, *, lease: LeaseRow, slot: int, seconds: float, job_id: str) -> float:
    """Give the last `seconds` that a slot worked for the job to the pause of a handoff; returns how many it found.

    The length is exact. The position is the time at which it was reported: a newcomer's pause comes from its start, and
    where intervals are shorter than the pause, several of them give it.
    """
    left = timedelta(seconds=seconds)
    row = _tail(session, lease_id=lease.lease_id, slot=slot)
    for _ in range(INTERVALS_BACK_MAX):
        if row is None or row.job_id != job_id or row.cause not in (*_WORKED, Cause.PAUSE) or not left:
            break
        if row.cause != Cause.PAUSE:
            left -= _pause_end_of(session, row, left)
        row = session.scalars(_BEFORE, {"lease_id": row.lease_id, "slot": slot, "ends_at": row.follows}).one_or_none()
    return seconds - left.total_seconds()


def _pause_end_of(session: Session, row: IntervalRow, most: timedelta) -> timedelta:
    """Make up to `most` of the end of an interval a pause, and return how much. What is left of it becomes an interval
    before, so that the one which follows is not touched."""
    length = row.ends_at - row.starts_at
    if length > most:
        cut = row.ends_at - most
        rest = IntervalRow(
            lease_id=row.lease_id,
            slot=row.slot,
            follows=row.follows,
            starts_at=row.starts_at,
            ends_at=cut,
            cause=row.cause,
            job_id=row.job_id,
            generation=row.generation,
        )
        row.starts_at = row.follows = cut
        session.add(rest)
    row.cause = Cause.PAUSE
    session.flush()
    return min(length, most)


def _continue(
    session: Session, tail: IntervalRow | None, *, lease: LeaseRow, slot: int, until: datetime, spent: Spent
) -> None:
    """Grow the slot's last interval if that has the same cause, else append one."""
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


def _tail(session: Session, *, lease_id: int, slot: int) -> IntervalRow | None:
    return session.scalars(_TAIL, {"lease_id": lease_id, "slot": slot}).one_or_none()
