"""Begins, finds and ends browser sessions."""

import hashlib
import re
import secrets
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import delete, select, text
from sqlalchemy.orm import Session

from service.sessions.tables import BrowserSessionRow
from service.tokens.operations import Caller, is_valid
from service.tokens.tables import PEOPLE, Role, TokenRow

COOKIE = "liver_session"
OF_A_TOKEN_MAX = 32
"""Sessions of one token at a time: one more ends the oldest."""
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_EXPIRED = text(
    """
    DELETE FROM browser_sessions WHERE secret_sha256 IN (
        SELECT secret_sha256 FROM browser_sessions WHERE expires_at <= :now ORDER BY expires_at LIMIT :most)
    """
)


def begin_session(session: Session, caller: Caller, *, lasts_s: float, now: datetime) -> tuple[str, datetime]:
    """The content of a cookie for this caller, and until when it is good: never longer than its token."""
    secret = secrets.token_urlsafe(32)
    expires_at = min(now + timedelta(seconds=lasts_s), caller.expires_at or datetime.max.replace(tzinfo=now.tzinfo))
    session.add(
        BrowserSessionRow(
            secret_sha256=_hashed(secret), token_id=caller.token_id, created_at=now, expires_at=expires_at
        )
    )
    session.flush()
    mine = select(BrowserSessionRow.secret_sha256).where(BrowserSessionRow.token_id == caller.token_id)
    newest_first = mine.order_by(BrowserSessionRow.created_at.desc(), BrowserSessionRow.secret_sha256)
    old = session.scalars(newest_first.offset(OF_A_TOKEN_MAX)).all()
    if old:
        session.execute(delete(BrowserSessionRow).where(BrowserSessionRow.secret_sha256.in_(old)))
    return secret, expires_at


def find_session(session: Session, secret: str, *, now: datetime) -> Caller | None:
    """Who has logged in with it; None if it or its token has ended. `expires_at` of the caller is the session's."""
    if not _SECRET.fullmatch(secret):
        return None
    found = session.execute(
        select(BrowserSessionRow, TokenRow)
        .join(TokenRow, TokenRow.token_id == BrowserSessionRow.token_id)
        .where(BrowserSessionRow.secret_sha256 == _hashed(secret))
    ).one_or_none()
    if found is None:
        return None
    row, token = found
    if row.expires_at <= now or not is_valid(token, now) or token.role not in PEOPLE:
        return None
    caller = Caller(token.token_id, Role(token.role), token.name, token.expires_at, token.node_id)
    return replace(caller, expires_at=row.expires_at)


def end_session(session: Session, secret: str) -> None:
    """From now on the cookie, and any copy of it, is of no use."""
    session.execute(delete(BrowserSessionRow).where(BrowserSessionRow.secret_sha256 == _hashed(secret)))


def expire_sessions(session: Session, *, now: datetime, most: int) -> int:
    """Delete up to `most` that have ended. Returns how many."""
    return session.connection().execute(_EXPIRED, {"now": now, "most": most}).rowcount


def _hashed(secret: str) -> str:
    # 256 random bits: a plain hash is enough, as for tokens.
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
