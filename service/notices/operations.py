"""Stores the notices that agents report, and what a person asks for in the same way: to drain a node, to undo it."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.notice_life import DRAIN, hear, merge, withdraw
from agent.protocol.sync import NoticeFact, NoticeKind
from service.jobs.membership import refresh_members
from service.jobs.operations import lock_job, touch
from service.jobs.tables import JobMemberRow
from service.leases.queries import open_lease
from service.leases.tables import LeaseRow
from service.nodes.tables import NodeRow
from service.notices.queries import as_fact, newest_rows
from service.notices.rules import same_loss
from service.notices.tables import NoticeRow
from service.problems import conflict, not_found


def record_notice(
    session: Session, fact: NoticeFact, *, lease_id: int, now: datetime, same_within: timedelta = timedelta(0)
) -> bool:
    """Append what is known of the notice after this fact. False if the fact changes nothing. `same_within`: how far
    apart the first sight of one notice may be, where the clock of who saw it is not exact.

    The lease's node is locked, so that no other row comes in between.
    """
    newest = _newest(session, lease_id, kind=fact.kind, source=fact.source)
    known = None if newest is None else as_fact(newest)
    if known is not None:
        fact = _aligned(known, fact, same_within)
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
        recorded_at=newest.recorded_at if newest is not None and is_same else now,
        raw=notice.raw,
        occurrence_id=newest.occurrence_id
        if newest is not None and is_same
        else _occurrence(session, lease_id, notice),
    )
    session.add(row)
    session.flush()
    if row.occurrence_id is None:
        row.occurrence_id = row.notice_id
        session.flush()
    return True


def _occurrence(session: Session, lease_id: int, notice: NoticeFact) -> int | None:
    """The newest occurrence of the lease that this notice belongs to; None if it is the first to announce the loss."""
    rows = session.scalars(newest_rows().where(NoticeRow.lease_id == lease_id)).all()
    return max((row.occurrence_id or row.notice_id for row in rows if same_loss(as_fact(row), notice)), default=None)


def _aligned(known: NoticeFact, fact: NoticeFact, within: timedelta) -> NoticeFact:
    """The fact with the known times where its own differ from them by no more: it is about the same notice."""
    is_anew = known.withdrawn_utc is not None and fact.withdrawn_utc is None
    if is_anew or abs(fact.first_seen_utc - known.first_seen_utc) > within:
        return fact
    deadline = fact.deadline_utc
    if deadline is not None and known.deadline_utc is not None and abs(deadline - known.deadline_utc) <= within:
        deadline = known.deadline_utc
    return fact.model_copy(update={"first_seen_utc": known.first_seen_utc, "deadline_utc": deadline})


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


def _take(session: Session, lease: LeaseRow, fact: NoticeFact, *, now: datetime) -> None:
    record_notice(session, fact, lease_id=lease.lease_id, now=now)
    tell_jobs(session, (fact.node_id,), now=now)


def tell_jobs(session: Session, node_ids: Iterable[str], *, now: datetime) -> None:
    """The notices of these nodes have changed: wake the agents of their jobs, which find them in their orders. Locks
    the jobs, in order of id; whoever calls has locked the nodes."""
    members = select(JobMemberRow.job_id).where(JobMemberRow.node_id.in_(list(node_ids)))
    for job_id in session.scalars(members.distinct().order_by(JobMemberRow.job_id)).all():
        job = lock_job(session, job_id)
        refresh_members(session, job, now=now)
        touch(session, job, now=now)


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
