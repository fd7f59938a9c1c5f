"""Reads of notices."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.sync import NoticeKind
from service.leases.tables import LeaseRow
from service.notices.rules import GRACE_AFTER_DEADLINE, WITHOUT_DEADLINE_LASTS, Notice, is_open
from service.notices.tables import NoticeRow

LIST_MAX = 1_000


def open_notices(session: Session, *, now: datetime, node_ids: Iterable[str] | None = None) -> tuple[NoticeRow, ...]:
    """Notices that still apply, of the given nodes or of all."""
    since = horizon(now)
    statement = (
        select(NoticeRow)
        .join(LeaseRow, LeaseRow.lease_id == NoticeRow.lease_id)
        .where(LeaseRow.ended_at.is_(None), (NoticeRow.deadline_at > since) | (NoticeRow.first_seen_at > since))
        .order_by(NoticeRow.notice_id)
    )
    if node_ids is not None:
        statement = statement.where(NoticeRow.node_id.in_(list(node_ids)))
    rows = session.scalars(statement).all()
    return tuple(row for row in rows if is_open(as_notice(row), now=now, lease_open=True))


def horizon(now: datetime) -> datetime:
    """A notice whose deadline and first sight are both before this time is not open."""
    return now - max(GRACE_AFTER_DEADLINE, WITHOUT_DEADLINE_LASTS)


def recent_notices(session: Session, *, limit: int) -> Sequence[NoticeRow]:
    """The newest notices, open or not."""
    return session.scalars(select(NoticeRow).order_by(NoticeRow.notice_id.desc()).limit(min(limit, LIST_MAX))).all()


def as_notice(row: NoticeRow) -> Notice:
    """The pure form."""
    return Notice(row.node_id, NoticeKind(row.kind), row.deadline_at, row.first_seen_at)
