"""Claims a key, keeps the answer that was given under it, removes what is old."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.errors import FieldProblem
from service.problems import conflict, invalid
from service.repeats.tables import AnswerRow

KEPT = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that names a key. Both are kept as digests only."""

    token_id: str
    key_sha256: str
    request_sha256: str


class AnsweredBefore(Exception):
    """The request was answered before: nothing is changed, and this is the answer."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


def claim(session: Session, ask: Ask, *, now: datetime) -> None:
    """Before the change, in its transaction. A request with the same key that is still being answered is waited for.

    Raises AnsweredBefore for the same request; 422 for another one under this key; 409 where its answer was not kept.
    """
    key = {"token_id": ask.token_id, "key_sha256": ask.key_sha256}
    session.execute(delete(AnswerRow).filter_by(**key).where(AnswerRow.answered_at <= now - KEPT))
    row = {**key, "request_sha256": ask.request_sha256, "answered_at": now}
    claimed = insert(AnswerRow).values(row).on_conflict_do_nothing().returning(AnswerRow.token_id)
    if session.execute(claimed).one_or_none() is not None:
        return
    known = session.execute(select(AnswerRow).filter_by(**key)).scalar_one()
    if known.request_sha256 != ask.request_sha256:
        rule = "was used for another request in the last 24 hours: each request needs one of its own"
        raise invalid(FieldProblem(field="Idempotency-Key", rule=rule))
    if known.status is None or known.body is None:
        raise conflict(
            "the same request was carried out before, and its answer, which has a secret in it, was not kept; revoke "
            "what it made, and ask again with another Idempotency-Key"
        )
    raise AnsweredBefore(known.status, known.body)


def keep(session: Session, ask: Ask, *, status: int, body: bytes) -> None:
    """After the change, in its transaction."""
    mine = (AnswerRow.token_id == ask.token_id) & (AnswerRow.key_sha256 == ask.key_sha256)
    session.execute(update(AnswerRow).where(mine).values(status=status, body=body))


def trim(session: Session, *, now: datetime, most: int) -> int:
    """Remove up to `most` answers that are older than a day. Returns how many."""
    old = (
        select(AnswerRow.token_id, AnswerRow.key_sha256)
        .where(AnswerRow.answered_at <= now - KEPT)
        .limit(most)
        .subquery()
    )
    statement = delete(AnswerRow).where(AnswerRow.token_id == old.c.token_id, AnswerRow.key_sha256 == old.c.key_sha256)
    return session.connection().execute(statement).rowcount
