"""Makes, checks and revokes tokens; writes the first ones to files that only their owner can read."""

import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.tokens.tables import Role, TokenRow

PREFIX = "liver"
TOKEN_CHARS_MAX = 256
_TOKEN_ID = re.compile("[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling, as proved by a token."""

    token_id: str
    role: Role
    name: str
    expires_at: datetime | None = None


def create_token(session: Session, *, role: Role, name: str, now: datetime) -> str:
    """A new token; this is the only moment at which its secret exists in clear."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    session.add(TokenRow(token_id=token_id, role=role, name=name, secret_sha256=_hashed(secret), created_at=now))
    session.flush()
    return f"{PREFIX}_{token_id}_{secret}"


def verify_token(session: Session, token: str, *, now: datetime) -> Caller | None:
    """The caller with this token, or None if it is unknown, expired or revoked."""
    if len(token) > TOKEN_CHARS_MAX:
        return None
    prefix, _, rest = token.partition("_")
    token_id, _, secret = rest.partition("_")
    # An id is hexadecimal: what is not, the database need not see, and may not be able to.
    row = session.get(TokenRow, token_id) if prefix == PREFIX and secret and _TOKEN_ID.fullmatch(token_id) else None
    # Hashed and compared even for an unknown id, so that the response time does not show which ids exist.
    matches = hmac.compare_digest(_hashed(secret), row.secret_sha256 if row else "0" * 64)
    if row is None or not matches or row.revoked_at is not None or (row.expires_at and row.expires_at <= now):
        return None
    return Caller(token_id=row.token_id, role=Role(row.role), name=row.name, expires_at=row.expires_at)


def ensure_first_tokens(session: Session, *, folder: Path, now: datetime) -> tuple[Path, ...]:
    """At the first start, create one token per role in `folder/ROLE.token` (mode 0600). Returns the files at any start.

    A deleted file is not created again while its token exists: somebody deleted it on purpose.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in Role:
        name = f"first-{role}"
        if session.scalars(select(TokenRow).where(TokenRow.name == name).limit(1)).first() is None:
            _write_private(folder / f"{role}.token", create_token(session, role=role, name=name, now=now))
    return tuple(path for role in Role if (path := folder / f"{role}.token").exists())


def _write_private(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content + "\n")


def _hashed(secret: str) -> str:
    # The secret has 256 random bits, so a plain hash is enough: there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()
