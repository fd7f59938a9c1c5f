"""Writes the ledger, always inside the transaction that stores the fact it accounts for."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby

from sqlalchemy import bindparam, func, select, text
from sqlalchemy.orm import Session

from service.leases.operations import end_lease
from service.leases.tables import LeaseRow
from service.ledger.rules import Part, Spent, painted
from service.ledger.sums import take_back
from service.ledger.tables import Cause, IntervalRow, KeptRow

INTERVALS_BACK_MAX = 64
"""How far back a pause is looked for: intervals of one slot."""
_LAST = (
    select(IntervalRow)
    .where(IntervalRow.lease_id == bindparam("lease_id"), IntervalRow.slot == bindparam("slot"))
    .order_by(IntervalRow.ends_at.desc())
    .limit(INTERVALS_BACK_MAX)
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
    RETURNING ledger.slot, ledger.starts_at
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
_OPEN = text(
    """
    SELECT leases.node_id, leases.lease_id, leases.pool, leases.slots, leases.pauses_due <> '{}' AS owes,
           place.slot, last.interval_id, last.starts_at, last.ends_at, last.cause, last.job_id, last.generation
      FROM leases
     CROSS JOIN LATERAL generate_series(0, leases.slots - 1) AS place (slot)
      LEFT JOIN LATERAL (
           SELECT * FROM ledger WHERE ledger.lease_id = leases.lease_id AND ledger.slot = place.slot
            ORDER BY ends_at DESC LIMIT 1) AS last ON true
     WHERE leases.node_id = ANY(CAST(:node_ids AS text[])) AND leases.ended_at IS NULL
     ORDER BY leases.lease_id, place.slot
    """
)
_GROW_ALL = text(
    """
    WITH tails AS MATERIALIZED (
         SELECT ledger.interval_id
           FROM unnest(CAST(:interval_ids AS bigint[]), CAST(:ended_at AS timestamptz[])) AS said (interval_id, ends_at)
           JOIN ledger ON ledger.interval_id = said.interval_id AND ledger.ends_at = said.ends_at
          ORDER BY ledger.interval_id FOR NO KEY UPDATE OF ledger)
    UPDATE ledger SET ends_at = :until FROM tails WHERE ledger.interval_id = tails.interval_id
    RETURNING ledger.interval_id
    """
)
_WORKED = (Cause.PRODUCTIVE, Cause.RECOMPUTE, Cause.BOOTSTRAP)
RECAST_MAX = 4_096
"""Intervals that one report may change, the oldest first."""
LEAST_S = 1e-6
"""The database counts no less."""


@dataclass(frozen=True, slots=True)
class Tails:
    """The last interval of each slot of a lease, once time is accounted. `until`: where all of them end. `since`: where
    those begin that have just grown, or begun (`begun`)."""

    until: datetime
    since: Mapping[int, datetime]
    begun: frozenset[int]


@dataclass(frozen=True, slots=True)
class Tail:
    """The last interval of a slot, as it was read."""

    interval_id: int
    starts_at: datetime
    ends_at: datetime
    spent: Spent


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A node's open lease. `tails`: by slot, of those that have one. `owes`: pauses are due."""

    pool: str
    slots: int
    owes: bool
    tails: tuple[Tail, ...]


def open_leases(session: Session, node_ids: Sequence[str]) -> dict[str, OpenLease]:
    """The open leases of these nodes, by node. Nothing is locked."""
    rows = session.execute(_OPEN, {"node_ids": list(node_ids)}) if node_ids else ()
    found = {}
    for (node_id, *_), slots in groupby(rows, lambda row: (row.node_id, row.lease_id)):
        of_lease = list(slots)
        first = of_lease[0]
        tails = tuple(
            Tail(row.interval_id, row.starts_at, row.ends_at, Spent(Cause(row.cause), row.job_id, row.generation))
            for row in of_lease
            if row.interval_id is not None
        )
        found[node_id] = OpenLease(first.pool, first.slots, first.owes, tails)
    return found


def grow(session: Session, tails: Sequence[Tail], *, until: datetime) -> bool:
    """Let these intervals go on up to `until`; False if one of them is not as it was read."""
    if not tails:
        return True
    values = {"interval_ids": [tail.interval_id for tail in tails], "ended_at": [tail.ends_at for tail in tails]}
    return len(session.execute(_GROW_ALL, values | {"until": until}).all()) == len(tails)


def account_all(session: Session, *, lease: LeaseRow, until: datetime, spent: Sequence[Spent]) -> Tails:
    """Continue the chain of each slot of a lease, from slot 0 on, up to `until`. Intervals that only grow (nearly all)
    share one statement, and so do those that begin. Pauses that are due are charged as far as there is time now."""
    values = {
        "lease_id": lease.lease_id,
        "until": until,
        "causes": [item.cause.value for item in spent],
        "job_ids": [item.job_id for item in spent],
        "generations": [item.generation for item in spent],
    }
    since = {row.slot: row.starts_at for row in session.execute(_GROW, values)}
    rest = [slot for slot in range(len(spent)) if slot not in since]
    begun = set()
    if rest:
        tails = {row.slot: row for row in session.scalars(_TAILS, {"lease_id": lease.lease_id, "slots": rest})}
        for slot in rest:
            tail = tails.get(slot)
            if _continue(session, tail, lease=lease, slot=slot, until=until, spent=spent[slot]):
                begun.add(slot)
                since[slot] = tail.ends_at if tail else lease.started_at
            elif tail is not None:
                # The time is accounted already, up to a little later than `until` by another replica's clock.
                until = max(until, tail.ends_at)
        session.flush()
    if lease.pauses_due:
        charge_due(session, lease)
    return Tails(until, since, frozenset(begun))


def close_lease(session: Session, *, lease: LeaseRow, at: datetime, spent: Sequence[Spent], reason: str) -> None:
    """Account all slots of the lease up to `at`, and end it there: it leaves no time without a cause."""
    end_lease(lease, now=account_all(session, lease=lease, until=at, spent=spent).until, reason=reason)


def recast(session: Session, *, node_id: str, slots: Iterable[int], parts: Sequence[Part]) -> None:
    """What these slots of a node are now known to have done in times that are accounted already. A measured pause, the
    time in which a world stood still and that of another job stay as they are. `parts` is in order of time and does not
    overlap."""
    if not parts:
        return
    overlapping = (
        select(IntervalRow)
        .join(LeaseRow, LeaseRow.lease_id == IntervalRow.lease_id)
        .where(LeaseRow.node_id == node_id, func.coalesce(LeaseRow.ended_at > parts[0].starts_at, True))
        .where(IntervalRow.slot.in_(sorted(slots)), IntervalRow.cause.not_in((Cause.PAUSE, Cause.STALLED)))
        .where(IntervalRow.ends_at > parts[0].starts_at, IntervalRow.starts_at < parts[-1].ends_at)
        .where(func.coalesce(IntervalRow.ends_at > select(KeptRow.kept_from).scalar_subquery(), True))
        .order_by(IntervalRow.lease_id, IntervalRow.slot, IntervalRow.starts_at)
        .limit(RECAST_MAX)
        .with_for_update(key_share=True, of=IntervalRow)
        .execution_options(populate_existing=True)
    )
    for row in session.scalars(overlapping).all():
        known = [part for part in parts if row.job_id in (None, part.spent.job_id)]
        _split(session, row, painted(_part_of(row), known))
    session.flush()


def recast_slots(session: Session, *, node_id: str, by_slot: Mapping[int, Sequence[Part]]) -> None:
    """Recast each of these slots of a node. Those that did the same share one statement."""
    alike: dict[tuple[Part, ...], list[int]] = defaultdict(list)
    for slot, parts in by_slot.items():
        alike[tuple(parts)].append(slot)
    for parts, slots in alike.items():
        recast(session, node_id=node_id, slots=slots, parts=parts)


def _split(session: Session, row: IntervalRow, parts: Sequence[Part]) -> None:
    """Put these parts in the place of an interval. It becomes the last of them, so that the one which follows is not
    touched."""
    *before, last = parts
    if row.rolled:
        if last == _part_of(row):
            return
        take_back(session, row.interval_id)
        row.rolled = False
    chain = [row.follows, *(part.ends_at for part in before)]
    for part, follows in zip(before, chain, strict=False):
        session.add(_interval(row.lease_id, row.slot, part, follows=follows))
    row.follows, row.starts_at = chain[-1], last.starts_at
    row.cause, row.generation, row.job_id = last.spent.cause, last.spent.generation, last.spent.job_id


def _part_of(row: IntervalRow) -> Part:
    return Part(row.starts_at, row.ends_at, Spent(Cause(row.cause), row.job_id, row.generation))


def _interval(lease_id: int, slot: int, part: Part, *, follows: datetime | None) -> IntervalRow:
    return IntervalRow(
        lease_id=lease_id,
        slot=slot,
        follows=follows,
        starts_at=part.starts_at,
        ends_at=part.ends_at,
        cause=part.spent.cause,
        job_id=part.spent.job_id,
        generation=part.spent.generation,
    )


def charge_pause(session: Session, *, lease: LeaseRow, slot: int, seconds: float, job_id: str) -> float:
    """Give the last `seconds` that a slot worked for the job to the pause of a handoff; returns how many it found. What
    is missing is due: the next time that the slot works for the job gives it.

    The length is exact. The position is the time at which it was reported: a newcomer's pause comes from its start, and
    where intervals are shorter than the pause, several of them give it.
    """
    found = _charge(session, lease=lease, slot=slot, seconds=seconds, job_id=job_id)
    if seconds - found >= LEAST_S:
        key = f"{slot}/{job_id}"
        lease.pauses_due = {**lease.pauses_due, key: lease.pauses_due.get(key, 0.0) + seconds - found}
    return found


def charge_due(session: Session, lease: LeaseRow) -> None:
    """Charge the pauses that are due as far as the lease has time now that its slots worked."""
    due = {}
    for key, seconds in lease.pauses_due.items():
        slot, job_id = key.split("/", 1)
        left = seconds - _charge(session, lease=lease, slot=int(slot), seconds=seconds, job_id=job_id)
        if left >= LEAST_S:
            due[key] = left
    if due != lease.pauses_due:
        lease.pauses_due = due


def _charge(session: Session, *, lease: LeaseRow, slot: int, seconds: float, job_id: str) -> float:
    left = timedelta(seconds=seconds)
    for row in session.scalars(_LAST, {"lease_id": lease.lease_id, "slot": slot}).all():
        if left and row.job_id == job_id and row.cause in _WORKED:
            left -= _pause_end_of(session, row, left)
    return seconds - left.total_seconds()


def _pause_end_of(session: Session, row: IntervalRow, most: timedelta) -> timedelta:
    """Make up to `most` of the end of an interval a pause, and return how much."""
    starts_at = max(row.starts_at, row.ends_at - most)
    pause = Part(starts_at, row.ends_at, Spent(Cause.PAUSE, row.job_id, row.generation))
    _split(session, row, painted(_part_of(row), [pause]))
    session.flush()
    return pause.ends_at - pause.starts_at


def _continue(
    session: Session, tail: IntervalRow | None, *, lease: LeaseRow, slot: int, until: datetime, spent: Spent
) -> bool:
    """Append an interval up to `until`, or grow the last one if that has the same cause; False if there is no time."""
    starts_at = tail.ends_at if tail else lease.started_at
    if until <= starts_at:
        return False
    part = Part(starts_at, until, spent)
    session.add(_interval(lease.lease_id, slot, part, follows=tail.ends_at if tail else None))
    return True
