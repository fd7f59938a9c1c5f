"""Stores the notices that agents report, and what a person asks for in the same way: to drain a node, to undo it."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from functools import cache

from sqlalchemy import ColumnElement, Select, bindparam, delete, func, or_, select, text
from sqlalchemy.orm import Session

from agent.protocol.notice_life import DRAIN, hear, is_open, merge, withdraw
from agent.protocol.sync import NoticeFact, NoticeKind
from service.jobs.operations import touch_all
from service.jobs.tables import JobMemberRow
from service.jobs.waking import wake_all
from service.leases.queries import open_lease
from service.leases.tables import LeaseRow
from service.nodes.queries import jobs_of_nodes
from service.nodes.tables import NodeRow
from service.notices.queries import (
    as_fact,
    counts,
    is_replaced,
    may_count,
    newest_rows,
    open_notices,
    rows_of_occurrences,
)
from service.notices.rules import (
    NOTICES_OF_LEASE_MAX,
    PEERS_SPEAK_AGAIN,
    aligned,
    horizon,
    over_at,
    same_loss,
    takes_node,
)
from service.notices.tables import NoticeRow
from service.problems import conflict, not_found

HISTORY_OF_LEASE_MAX = 256
"""So many rows that say nothing any more are kept of a lease while it lasts."""


class LeaseNotices:
    """The notices of one lease, the newest row of each: as stored, and as added since. The lease's node is locked, so
    that no other row comes in between. `store_added` writes what was added."""

    def __init__(self, rows: Iterable[NoticeRow] = ()) -> None:
        self._newest = {(row.kind, row.source, row.event_id): row for row in rows}
        # Of the rows that were added: the number of the occurrence, or the row that begins it.
        self._first: dict[NoticeRow, NoticeRow | int] = {}
        # Of those that say more of a notice: the row that they replace.
        self._before: dict[NoticeRow, NoticeRow] = {}
        self.added: list[NoticeRow] = []
        self._has_replaced = False

    def may_be_many(self) -> bool:
        """Whether there may be more rows of the lease than are kept: not where each source spoke once, and few did."""
        return self._has_replaced or len(self._newest) > NOTICES_OF_LEASE_MAX

    def known(self, now: datetime, *, by_peers: bool | None = None) -> tuple[NoticeFact, ...]:
        """What is known of every notice that may still count. `by_peers`: only of those that peers alone have told, or
        only of the others."""
        found = []
        for row in self._newest.values():
            fact, is_told = as_fact(row), row.told_in is not None
            if is_told and now >= over_at(fact, told_in=row.told_in, recorded_at=row.recorded_at):
                continue
            if may_count(fact, now) and by_peers in (None, is_told):
                found.append(fact)
        return tuple(found)

    def stands(self, fact: NoticeFact, now: datetime) -> bool:
        """Whether the node itself has said something of this kind and source that counts: no peer knows better."""
        row = self._row_of(fact)
        return row is not None and row.told_in is None and is_open(as_fact(row), now)

    def is_hearsay(self, fact: NoticeFact) -> bool:
        """Whether only peers have said something of its kind and source."""
        row = self._row_of(fact)
        return row is not None and row.told_in is not None

    def confirm(self, fact: NoticeFact, *, same_within: timedelta) -> bool:
        """The node itself says what peers have said before; False where that is something else."""
        row = self._row_of(fact)
        if row is None or _as_said(fact, as_fact(row), same_within) != as_fact(row):
            return False
        row.told_in = None
        return True

    def occurrence_of(self, notice: NoticeFact) -> int | None:
        """The number of the occurrence that the newest row of its notice belongs to, once that is written."""
        row = self._row_of(notice)
        return None if row is None else row.occurrence_id

    def add(
        self,
        fact: NoticeFact,
        *,
        lease_id: int,
        now: datetime,
        same_within: timedelta = timedelta(0),
        told_in: str | None = None,
    ) -> bool:
        """As `record_notice`, which says what is what. `told_in`: the job in which a peer said so."""
        newest = self._row_of(fact)
        known = None if newest is None else as_fact(newest)
        if known is not None:
            fact = aligned(known, fact, same_within)
        notice = merge(known, fact)
        if notice == known:
            return False
        is_same = newest is not None and newest.first_seen_at == notice.first_seen_utc
        row = NoticeRow(
            node_id=notice.node_id,
            lease_id=lease_id,
            kind=notice.kind.value,
            source=notice.source,
            deadline_at=notice.deadline_utc,
            first_seen_at=notice.first_seen_utc,
            withdrawn_at=notice.withdrawn_utc,
            recorded_at=newest.recorded_at if newest is not None and is_same else self._first_word(fact, told_in, now),
            raw=notice.raw,
            event_id=notice.event_id,
            said_at=notice.said_utc,
            told_in=told_in,
        )
        # The newest occurrence that it belongs to; its own if it is the first to announce the loss.
        same = [item for item in self._newest.values() if same_loss(as_fact(item), notice)]
        # A planned event that is moved is still the same one.
        is_moved = known is not None and bool(notice.event_id) and is_open(known, now)
        self._first[row] = (
            self._occurrence(newest)
            if newest is not None and (is_same or is_moved)
            else max((self._occurrence(item) for item in same), key=self._age, default=row)
        )
        if newest is not None and is_same:
            self._before[row] = newest
        self._has_replaced |= newest is not None
        self._newest[row.kind, row.source, row.event_id] = row
        self.added.append(row)
        return True

    def name_jobs(self, working: Mapping[str, Collection[str]]) -> None:
        """Write into the rows that were added which jobs their notice met. `working`: the jobs of each node by now.
        What a notice met stays with it, and it meets no more once it is withdrawn."""
        for row in self.added:
            before, met = self._before.get(row), working.get(row.node_id, ())
            if before is not None:
                met = before.job_ids if row.withdrawn_at is not None else {*before.job_ids, *met}
            row.job_ids = sorted(met)

    def number(self) -> None:
        """Once the rows that were added have their numbers: give each the one of its occurrence."""
        for row in self.added:
            first = self._first[row]
            row.occurrence_id = first if isinstance(first, int) else first.notice_id
        self.added, self._first, self._before = [], {}, {}

    def _first_word(self, fact: NoticeFact, told_in: str | None, now: datetime) -> datetime:
        """From when on it counts: what peers tell, from their first word of a loss, or of advice."""
        if told_in is None:
            return now
        told = (row for row in self._newest.values() if row.told_in is not None)
        alike = (row for row in told if takes_node(NoticeKind(row.kind)) is takes_node(fact.kind))
        return min((row.recorded_at for row in alike if now - row.recorded_at < PEERS_SPEAK_AGAIN), default=now)

    def _row_of(self, notice: NoticeFact) -> NoticeRow | None:
        return self._newest.get((notice.kind.value, notice.source, notice.event_id))

    def _occurrence(self, row: NoticeRow) -> NoticeRow | int:
        """Its number, or the row that begins it, which has none yet."""
        return self._first.get(row, row.occurrence_id or row.notice_id)

    def _age(self, occurrence: NoticeRow | int) -> tuple[bool, int]:
        if isinstance(occurrence, int):
            return False, occurrence
        return True, self.added.index(occurrence)


def notices_of_leases(session: Session, lease_ids: Collection[int]) -> dict[int, LeaseNotices]:
    """Of each of these leases."""
    rows: dict[int, list[NoticeRow]] = {lease_id: [] for lease_id in lease_ids}
    for row in session.scalars(_of_leases(), {"lease_ids": list(lease_ids)}) if lease_ids else ():
        rows[row.lease_id].append(row)
    return {lease_id: LeaseNotices(found) for lease_id, found in rows.items()}


@cache
def _of_leases() -> Select[NoticeRow]:
    # Numbers may have changed since a row was read in this transaction, see `forget`.
    newest = newest_rows().execution_options(populate_existing=True)
    return newest.where(NoticeRow.lease_id.in_(bindparam("lease_ids", expanding=True)))


def store_added(session: Session, notices: Iterable[LeaseNotices]) -> None:
    """Write what was added, all of it at once."""
    changed = [item for item in notices if item.added]
    added = [row for item in changed for row in item.added]
    if not added:
        return
    jobs = jobs_of_nodes(session, {row.node_id for row in added})
    for item in changed:
        item.name_jobs(jobs)
    session.add_all(added)
    session.flush()
    for item in changed:
        item.number()
    session.flush()


def forget(session: Session, notice: NoticeFact, *, lease_id: int) -> None:
    """Delete what is stored of a notice that gives way to another one of its lease."""
    same = NoticeRow.kind == notice.kind.value, NoticeRow.source == notice.source, NoticeRow.event_id == notice.event_id
    _delete(session, lease_id, *same)


def forget_hearsay(session: Session, notice: NoticeFact, *, lease_id: int) -> None:
    """Delete what only peers have told of a notice's kind and source: the node itself says something else."""
    is_told = NoticeRow.told_in.is_not(None)
    _delete(session, lease_id, NoticeRow.kind == notice.kind.value, NoticeRow.source == notice.source, is_told)


def forget_oldest(session: Session, *, lease_id: int, now: datetime) -> bool:
    """Of the lease's rows that say nothing any more, since a later one says more or their notice is over, keep the
    newest HISTORY_OF_LEASE_MAX. Whether some were deleted."""
    silent = or_(is_replaced(), ~func.coalesce(counts(horizon(now)), False))
    rows = select(NoticeRow.notice_id).where(NoticeRow.lease_id == lease_id, silent)
    oldest = rows.order_by(NoticeRow.notice_id.desc()).offset(HISTORY_OF_LEASE_MAX)
    return _delete(session, lease_id, NoticeRow.notice_id.in_(oldest))


_RENUMBER = text(
    """
    WITH headless AS (
         SELECT occurrence_id, min(notice_id) AS first_id FROM notices WHERE lease_id = :lease_id
          GROUP BY occurrence_id HAVING min(notice_id) <> occurrence_id),
         hearings AS (
         UPDATE notice_hearings SET occurrence_id = first_id FROM headless
          WHERE notice_hearings.occurrence_id = headless.occurrence_id)
    UPDATE notices SET occurrence_id = first_id FROM headless
     WHERE notices.lease_id = :lease_id AND notices.occurrence_id = headless.occurrence_id
    """
)


def _delete(session: Session, lease_id: int, *which: ColumnElement[bool]) -> bool:
    """Whether there was any such row of the lease. An occurrence has the number of the first row that is left of it."""
    gone = delete(NoticeRow).where(NoticeRow.lease_id == lease_id, *which).returning(NoticeRow.notice_id)
    if not session.execute(gone.execution_options(synchronize_session=False)).all():
        return False
    session.execute(_RENUMBER, {"lease_id": lease_id})
    return True


def record_notice(
    session: Session, fact: NoticeFact, *, lease_id: int, now: datetime, same_within: timedelta = timedelta(0)
) -> bool:
    """Append what is known of the notice after this fact. False if the fact changes nothing. `same_within`: how far
    apart the first sight of one notice may be, where the clock of who saw it is not exact.

    The lease's node is locked, so that no other row comes in between.
    """
    notices = notices_of_leases(session, [lease_id])[lease_id]
    is_news = notices.add(fact, lease_id=lease_id, now=now, same_within=same_within)
    if is_news:
        store_added(session, [notices])
    return is_news


def _as_said(fact: NoticeFact, known: NoticeFact, within: timedelta) -> NoticeFact:
    return aligned(known, fact, within).model_copy(update={"raw": known.raw})


def drain_node(session: Session, node_id: str, *, in_s: float, now: datetime) -> None:
    """Have jobs leave the node within `in_s`, and keep it empty until that is undone. Raises 404, or 409 if the node is
    gone or is drained sooner already."""
    lease = _lease_of(session, node_id)
    known = _drain_of(session, lease)
    said = NoticeFact(
        node_id=node_id,
        kind=NoticeKind.MAINTENANCE,
        source=DRAIN,
        deadline_utc=now + timedelta(seconds=in_s),
        first_seen_utc=now,
        raw=f"asked for, in {in_s:g} s",
    )
    fact = hear(known, said)
    if fact is None:
        assert known is not None and known.deadline_utc is not None, "a drain names its time"
        raise conflict(f"node {node_id} is drained already, by {known.deadline_utc:%H:%M:%S} UTC; undo that first")
    _take(session, lease, fact, now=now)


def undo_drain(session: Session, node_id: str, *, now: datetime) -> None:
    """Let jobs use the node again. Raises 404, or 409 if it is not drained."""
    lease = _lease_of(session, node_id)
    known = _drain_of(session, lease)
    if known is None or known.withdrawn_utc is not None:
        raise conflict(f"node {node_id} is not drained")
    _take(session, lease, withdraw(known, now), now=now)
    wake_all(session, now=now)


def end_notice(session: Session, number: int, *, now: datetime) -> tuple[NoticeFact, ...]:
    """Take back what all channels say of the occurrence with this number, as if each did so itself. Returns the facts.
    Raises 404, or 409 where the node is gone or the notice does not count any more."""
    found = rows_of_occurrences(session, [number])
    if not found:
        raise not_found("notice", str(number))
    node_id = found[0][1][0].node_id
    lease = _lease_of(session, node_id)
    counting = open_notices(session, now=now, node_ids=[node_id])
    facts = tuple(withdraw(as_fact(row), now) for row in counting if row.occurrence_id == number)
    if not facts:
        raise conflict(f"notice {number}, of node {node_id}, does not count any more")
    notices = notices_of_leases(session, [lease.lease_id])[lease.lease_id]
    for fact in facts:
        notices.add(fact, lease_id=lease.lease_id, now=now)
    store_added(session, [notices])
    tell_jobs(session, {node_id: True}, now=now)
    wake_all(session, now=now)
    return facts


def _take(session: Session, lease: LeaseRow, fact: NoticeFact, *, now: datetime) -> None:
    record_notice(session, fact, lease_id=lease.lease_id, now=now)
    tell_jobs(session, {fact.node_id: True}, now=now)


def tell_jobs(session: Session, nodes: Mapping[str, bool], *, now: datetime) -> None:
    """The notices of these nodes have changed: the agents of their jobs find them in their orders, and are woken where
    it is urgent, as `is_urgent` says of each node. Locks the jobs, in order of id; whoever calls has locked the
    nodes."""
    if not nodes:
        return
    members = select(JobMemberRow.job_id, JobMemberRow.node_id).where(JobMemberRow.node_id.in_(list(nodes)))
    urgent: dict[str, bool] = {}
    for job_id, node_id in session.execute(members):
        urgent[job_id] = urgent.get(job_id, False) or nodes[node_id]
    touch_all(session, urgent, now=now)


def _lease_of(session: Session, node_id: str) -> LeaseRow:
    """The open lease of the node, whose row is locked: no report of it is stored meanwhile."""
    node = session.scalars(select(NodeRow).where(NodeRow.node_id == node_id).with_for_update(key_share=True))
    if node.one_or_none() is None:
        raise not_found("node", node_id)
    lease = open_lease(session, node_id)
    if lease is None:
        raise conflict(f"node {node_id} is gone")
    return lease


def _drain_of(session: Session, lease: LeaseRow) -> NoticeFact | None:
    newest = _newest(session, lease.lease_id, kind=NoticeKind.MAINTENANCE, source=DRAIN)
    return None if newest is None else as_fact(newest)


def _newest(session: Session, lease_id: int, *, kind: NoticeKind, source: str) -> NoticeRow | None:
    return session.scalars(
        select(NoticeRow)
        .where(NoticeRow.lease_id == lease_id, NoticeRow.kind == kind.value, NoticeRow.source == source)
        .order_by(NoticeRow.notice_id.desc())
        .limit(1)
    ).one_or_none()
