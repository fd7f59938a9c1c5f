"""Stores the notices that agents report."""

from datetime import datetime

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.sync import NoticeFact
from service.notices.tables import NoticeRow


def record_notice(session: Session, fact: NoticeFact, *, lease_id: int, now: datetime) -> bool:
    """Append a notice. False if the lease already has one of the same kind with the same deadline."""
    inserted = session.execute(
        insert(NoticeRow)
        .values(
            node_id=fact.node_id,
            lease_id=lease_id,
            kind=fact.kind.value,
            source=fact.source,
            deadline_at=fact.deadline_utc,
            first_seen_at=fact.first_seen_utc,
            recorded_at=now,
            raw=fact.raw,
        )
        .on_conflict_do_nothing(index_elements=["lease_id", "kind", "deadline_at"])
        .returning(NoticeRow.notice_id)
    ).scalar_one_or_none()
    return inserted is not None
