"""Claims: take due rows with SKIP LOCKED, work outside of any transaction, apply only with the claim's token."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import Session

from service.db.base import Claimed

RowT = TypeVar("RowT", bound=Claimed)


def claim_due(
    session: Session,
    table: type[RowT],
    *,
    due: ColumnElement[bool],
    order_by: Any,
    token: UUID,
    now: datetime,
    claim_s: float,
    most: int,
) -> Sequence[RowT]:
    """Claim at most `most` rows that are due and not claimed by a living reconciler. Commits nothing."""
    free = table.claim_expires_at.is_(None) | (table.claim_expires_at < now)
    statement = (
        select(table).where(due, free).order_by(order_by).limit(most).with_for_update(skip_locked=True, key_share=True)
    )
    rows = session.scalars(statement).all()
    for row in rows:
        row.claim_token = token
        row.claim_expires_at = now + timedelta(seconds=claim_s)
    return rows


def take_back(session: Session, table: type[RowT], *, key: ColumnElement[bool], token: UUID) -> RowT | None:
    """Lock the row again to apply a decision; None if the claim has been lost to another reconciler."""
    statement = select(table).where(key, table.claim_token == token).with_for_update(key_share=True)
    row = session.scalars(statement.execution_options(populate_existing=True)).one_or_none()
    if row is not None:
        row.claim_token = None
        row.claim_expires_at = None
    return row


def release(session: Session, table: type[RowT], *, key: ColumnElement[bool], token: UUID) -> None:
    """Give a claim back without having changed anything."""
    session.execute(
        update(table).where(key, table.claim_token == token).values(claim_token=None, claim_expires_at=None)
    )
