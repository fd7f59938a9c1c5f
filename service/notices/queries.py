"""Reads of notices. The newest row of a node, kind, source and planned event says all that is known of its notice."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, bindparam, select, text
from sqlalchemy.orm import Session, aliased

from agent.protocol.notice_life import DRAIN, is_open
from agent.protocol.sync import NoticeFact, NoticeKind
from service.db.base import among
from service.handoffs.tables import HandoffRow
from service.jobs.tables import JobRow
from service.leases.tables import LeaseRow
from service.notices.rules import COUNTS_AT_MOST, PEERS_WORD_LASTS, horizon
from service.notices.tables import NoticeRow
from service.paging import Pages


def open_notices(session: Session, *, now: datetime, node_ids: Iterable[str] | None = None) -> tuple[NoticeRow, ...]:
    """Notices that still count, of the given nodes or of all."""
    values: dict[str, Any] = {"since": horizon(now)}
    if node_ids is not None:
        values["node_ids"] = list(node_ids)
    rows = session.scalars(_counting(of_nodes=node_ids is not None), values)
    return tuple(row for row in rows if is_open(as_fact(row), now))


# Built once, as the others with `cache`: to build such a statement takes about a millisecond of processor time.
@cache
def _counting(*, of_nodes: bool) -> Select[NoticeRow]:
    statement = (
        newest_rows()
        .join(LeaseRow, LeaseRow.lease_id == NoticeRow.lease_id)
        .where(LeaseRow.ended_at.is_(None), counts(bindparam("since")))
    )
    return statement.where(among(NoticeRow.node_id, "node_ids")) if of_nodes else statement


def known_of_lease(session: Session, lease_id: int, *, now: datetime) -> tuple[NoticeFact, ...]:
    """What is known of every notice of a lease that may still count."""
    rows = session.scalars(_counting_of_lease(), {"lease_id": lease_id, "since": horizon(now)})
    return tuple(as_fact(row) for row in rows)


@cache
def _counting_of_lease() -> Select[NoticeRow]:
    return newest_rows().where(NoticeRow.lease_id == bindparam("lease_id"), counts(bindparam("since")))


@cache
def newest_rows() -> Select[NoticeRow]:
    """The newest row of each notice: each contains what the ones before it said, see `record_notice`."""
    return select(NoticeRow).where(~is_replaced()).order_by(NoticeRow.notice_id)


@cache
def is_replaced() -> ColumnElement[bool]:
    """Whether a newer row says more of the notice."""
    newer = aliased(NoticeRow)
    return (
        select(newer.notice_id)
        .where(
            newer.lease_id == NoticeRow.lease_id,
            newer.kind == NoticeRow.kind,
            newer.source == NoticeRow.source,
            newer.event_id == NoticeRow.event_id,
            newer.notice_id > NoticeRow.notice_id,
        )
        .exists()
    )


def list_occurrences(
    session: Session, pages: Pages, *, node_id: str | None = None, job_id: str | None = None
) -> Sequence[tuple[int, Sequence[NoticeRow]]]:
    """What was announced of all nodes, or of one, or of those of a job, that counts or not, newest first. Each with its
    number and the newest row of each notice that announces it, in the order in which they were first seen."""
    first = heads(node_id=node_id, job_id=job_id)
    return rows_of_occurrences(session, [row.notice_id for row in pages.newest(session, first, NoticeRow.notice_id)])


def heads(*, node_id: str | None = None, job_id: str | None = None):
    """The first row of each occurrence, of all nodes, or of one, or of those of a job. Its id is their number."""
    first = select(NoticeRow).where(NoticeRow.notice_id == NoticeRow.occurrence_id)
    if node_id is not None:
        first = first.where(NoticeRow.node_id == node_id)
    if job_id is not None:
        first = first.where(NoticeRow.job_ids.contains([job_id]))
    return first


def rows_of_occurrences(session: Session, numbers: Sequence[int]) -> Sequence[tuple[int, Sequence[NoticeRow]]]:
    """Of occurrences by their numbers, the same of those that there are."""
    newest: dict[int, dict[tuple[str, str, str], NoticeRow]] = {number: {} for number in numbers}
    rows = select(NoticeRow).where(NoticeRow.occurrence_id.in_(numbers)).order_by(NoticeRow.notice_id)
    for row in session.scalars(rows):
        assert row.occurrence_id is not None
        newest[row.occurrence_id][row.kind, row.source, row.event_id] = row
    return [
        (number, sorted(found.values(), key=lambda row: (row.first_seen_at, row.notice_id)))
        for number, found in newest.items()
        if found
    ]


_BEHIND = text(
    """
    SELECT answer.handoff_id, found.occurrence_id, found.first_seen_at
      FROM unnest(CAST(:handoff_ids AS uuid[]), CAST(:node_ids AS text[]), CAST(:opened AS timestamptz[]))
           AS answer (handoff_id, node_id, opened_at)
     CROSS JOIN LATERAL (
           SELECT occurrence_id, first_seen_at FROM notices
            WHERE notices.node_id = answer.node_id AND notices.occurrence_id IS NOT NULL
              AND first_seen_at <= answer.opened_at + interval '5 seconds'
              AND recorded_at >= answer.opened_at - interval '1 hour'
            ORDER BY first_seen_at DESC LIMIT 1) AS found
     ORDER BY answer.handoff_id, found.first_seen_at DESC
    """
)


def notices_behind(session: Session, handoffs: Iterable[HandoffRow]) -> dict[UUID, tuple[int, datetime]]:
    """The notice that each of these handoffs answers, if any: its number and first sight, of all that its leaving nodes
    had at that time the earliest."""
    answers = [(row.handoff_id, node_id, row.opened_at) for row in handoffs for node_id in row.leaving]
    if not answers:
        return {}
    ids, nodes, opened = (list(values) for values in zip(*answers, strict=True))
    rows = session.execute(_BEHIND, {"handoff_ids": ids, "node_ids": nodes, "opened": opened})
    return {row.handoff_id: (row.occurrence_id, row.first_seen_at) for row in rows}


def as_fact(row) -> NoticeFact:
    """The fact that a row holds, of this table or of a join that names its columns the same."""
    return NoticeFact(
        node_id=row.node_id,
        kind=NoticeKind(row.kind),
        source=row.source,
        deadline_utc=row.deadline_at,
        first_seen_utc=row.first_seen_at,
        raw=row.raw,
        withdrawn_utc=row.withdrawn_at,
        event_id=row.event_id,
        said_utc=row.said_at,
    )


def may_count(fact: NoticeFact, now: datetime) -> bool:
    """The same as the condition below, of a fact."""
    since = horizon(now)
    if fact.source == DRAIN and (fact.withdrawn_utc is None or fact.withdrawn_utc > since):
        return True
    return fact.first_seen_utc > since or (fact.deadline_utc is not None and fact.deadline_utc > since)


def counts(since: Any) -> ColumnElement[bool]:
    """Whether the notice of a row may still count; null where it says no deadline and does not. `since`: the horizon,
    or the parameter that will be. What only peers have said ends with the job in which they said so."""
    is_live = select(JobRow.job_id).where(JobRow.job_id == NoticeRow.told_in, JobRow.due_at.is_not(None)).exists()
    is_new = NoticeRow.recorded_at - (COUNTS_AT_MOST - PEERS_WORD_LASTS) > since
    is_drain = (NoticeRow.source == DRAIN) & (NoticeRow.withdrawn_at.is_(None) | (NoticeRow.withdrawn_at > since))
    is_near = (NoticeRow.deadline_at > since) | (NoticeRow.first_seen_at > since) | is_drain
    return is_near & (NoticeRow.told_in.is_(None) | (is_new & is_live))
