"""Makes, checks, rotates and revokes tokens; writes the first ones to files that only their owner can read."""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from service.capacity.operations import release_machine
from service.db.base import among
from service.db.wake import TOKENS, notify
from service.jobs.operations import end_part
from service.nodes.operations import mark_gone
from service.nodes.tables import NodeRow, NodeState
from service.paging import Pages
from service.problems import conflict, not_found, unauthenticated
from service.tokens.tables import ISSUED, Role, TokenRow

PREFIX = "liver"
LOCK_NAMES = 0x11FE_0006
FIRST_REPORT_WITHIN = timedelta(minutes=5)
"""An agent reports at once when it has joined. One that has not by then is gone, and its name is free."""
TOKEN_CHARS_MAX = 256
FIRST = {Role.ADMIN: "admin", Role.OPERATOR: "operator", Role.JOIN: "join"}
"""The tokens of a new installation, by the name of their file."""
_FORMER_FILES = {Role.OPERATOR: "script", Role.JOIN: "agent"}
_TOKEN_ID = re.compile("[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling, as proved by a token. `node_id`: the only node it may speak for. `why`: why it asks for a change,
    as it says."""

    token_id: str
    role: Role
    name: str
    expires_at: datetime | None = None
    node_id: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """What a node gets when it joins: the id of its key, whose secret it has made itself, and a first token."""

    key_id: str
    token: str
    expires_at: datetime


def create_token(
    session: Session,
    *,
    role: Role,
    name: str,
    now: datetime,
    expires_at: datetime | None = None,
    uses_left: int | None = None,
    node_id: str | None = None,
    created_by: str | None = None,
) -> tuple[TokenRow, str]:
    """A new token; this is the only moment at which its secret exists in clear."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    row = TokenRow(
        token_id=token_id,
        role=role,
        name=name,
        secret_sha256=_hashed(secret),
        created_at=now,
        expires_at=expires_at,
        uses_left=uses_left,
        node_id=node_id,
        created_by=created_by,
    )
    session.add(row)
    session.flush()
    return row, f"{PREFIX}_{token_id}_{secret}"


def verify_token(session: Session, token: str, *, now: datetime) -> Caller | None:
    """The caller with this token, or None if it is unknown, expired or revoked."""
    if len(token) > TOKEN_CHARS_MAX or "\x00" in token:
        return None
    prefix, _, rest = token.partition("_")
    token_id, _, secret = rest.partition("_")
    # An id is hexadecimal: what is not, the database need not see, and may not be able to.
    row = session.get(TokenRow, token_id) if prefix == PREFIX and secret and _TOKEN_ID.fullmatch(token_id) else None
    # Hashed and compared even for an unknown id, so that the response time does not show which ids exist.
    matches = hmac.compare_digest(_hashed(secret), row.secret_sha256 if row else "0" * 64)
    if row is None or not matches or not is_valid(row, now):
        return None
    return Caller(row.token_id, Role(row.role), row.name, row.expires_at, row.node_id)


def still_valid(session: Session, token_ids: Sequence[str], *, now: datetime) -> set[str]:
    """Those of these tokens, verified before, that are neither revoked nor expired, in one statement."""
    lives = TokenRow.revoked_at.is_(None) & (TokenRow.expires_at.is_(None) | (TokenRow.expires_at > now))
    statement = select(TokenRow.token_id).where(among(TokenRow.token_id, "token_ids"), lives)
    return set(session.scalars(statement, {"token_ids": list(token_ids)}))


def is_valid(row: TokenRow, now: datetime) -> bool:
    """Neither revoked nor expired."""
    return row.revoked_at is None and (row.expires_at is None or now < row.expires_at)


def list_tokens(session: Session, pages: Pages, *, revoked: bool = False) -> Sequence[TokenRow]:
    """Tokens that admins have made and the keys of nodes, newest first. Without `revoked`, only those that may work."""
    statement = select(TokenRow).where(TokenRow.role.in_((*ISSUED, Role.NODE_KEY)))
    if not revoked:
        statement = statement.where(TokenRow.revoked_at.is_(None))
    return pages.newest(session, statement, TokenRow.created_at, TokenRow.token_id)


def revoke_token(session: Session, token_id: str, *, now: datetime) -> TokenRow:
    """From now on the token does not work. With the key of a node end the tokens that were fetched with it, its part in
    its jobs, and its lease: it counts as gone. Raises 404 for an unknown one, and 409 for the last one of an admin:
    nobody could make another. Revoking twice changes nothing."""
    # In one order, so that two admins who revoke each other's token wait for each other.
    admins = session.scalars(
        select(TokenRow)
        .where(TokenRow.role == Role.ADMIN, TokenRow.revoked_at.is_(None))
        .order_by(TokenRow.token_id)
        .with_for_update()
    ).all()
    row = _locked(session, token_id)
    if row.revoked_at is not None:
        return row
    if [each.token_id for each in admins if is_valid(each, now)] == [token_id]:
        raise conflict(f"token {token_id} is the only admin's token that works: create another one first")
    row.revoked_at = now
    if row.role == Role.NODE_KEY:
        assert row.node_id is not None  # The database checks this too.
        session.execute(delete(TokenRow).where(TokenRow.role == Role.NODE, TokenRow.node_id == row.node_id))
        notify(session, [TOKENS])
        node = _lock_node(session, row.node_id)
        end_part(session, row.node_id, now=now)
        if node is not None and node.state != NodeState.GONE:
            mark_gone(session, node, reason="its key was revoked", now=now)
    return row


def check_still_valid(session: Session, caller: Caller, *, now: datetime) -> None:
    """Raises 401 if the caller's token was revoked or has expired since it was looked up, a moment ago or earlier."""
    row = session.get(TokenRow, caller.token_id, populate_existing=True)
    if row is None or not is_valid(row, now):
        raise unauthenticated("this token was revoked, or has expired")


def rotate_token(
    session: Session, token_id: str, *, grace_s: float, now: datetime, created_by: str
) -> tuple[TokenRow, str]:
    """A new token with the same role, name and limits. The old one works for `grace_s` more, so that whoever uses it
    can change over. Raises 404 for an unknown one, 409 for one that no longer works and for a node's key."""
    old = _locked(session, token_id)
    if old.role not in ISSUED:
        raise conflict(f"token {token_id} belongs to node {old.node_id}, whose agent rotates it: revoke it instead")
    if not is_valid(old, now):
        raise conflict(f"token {token_id} no longer works: create a new one")
    row, token = create_token(
        session,
        role=Role(old.role),
        name=old.name,
        now=now,
        expires_at=old.expires_at + (now - old.created_at) if old.expires_at is not None else None,
        uses_left=old.uses_left,
        node_id=old.node_id,
        created_by=created_by,
    )
    ends_at = now + timedelta(seconds=grace_s)
    old.expires_at = ends_at if old.expires_at is None else min(old.expires_at, ends_at)
    return row, token


def join_node(session: Session, caller: Caller, *, node_id: str, secret: str, token_s: float, now: datetime) -> Joined:
    """Make a node known by the key that its agent has made. Repeating it with the same key changes nothing, also where
    the join token has been used up by it: the first answer may have been lost.

    Raises 409 if the token is for another node or used up, and while another agent serves a node of this name.
    """
    token = _locked(session, caller.token_id)
    if token.node_id not in (None, node_id):
        raise conflict(f"node_id: this join token is for node {token.node_id}, not {node_id}")
    key = session.scalars(
        select(TokenRow).where(
            TokenRow.role == Role.NODE_KEY,
            TokenRow.node_id == node_id,
            TokenRow.secret_sha256 == _hashed(secret),
            TokenRow.revoked_at.is_(None),
        )
    ).one_or_none()
    if key is None:
        if token.uses_left == 0:
            raise conflict("this join token has been used: have an admin create another one (liver tokens create)")
        key = _new_key(session, token, node_id=node_id, secret=secret, now=now)
    return Joined(key.token_id, *issue_node_token(session, node_id, token_s=token_s, created_by=key.token_id, now=now))


def _new_key(session: Session, token: TokenRow, *, node_id: str, secret: str, now: datetime) -> TokenRow:
    # A name that is new has no row to lock: those who join under it at once come one after the other.
    session.execute(select(func.pg_advisory_xact_lock(LOCK_NAMES, func.hashtext(node_id))))
    node = _lock_node(session, node_id)
    earlier = (TokenRow.role == Role.NODE_KEY) & (TokenRow.node_id == node_id) & TokenRow.revoked_at.is_(None)
    newest = session.scalars(select(TokenRow).where(earlier).order_by(TokenRow.created_at.desc()).limit(1)).first()
    is_served = node is not None and node.state != NodeState.GONE
    if newest is not None and (is_served or _may_still_report(newest, node, now)):
        raise conflict(
            f"node_id: another agent serves node {node_id}; if that one has ended, try again when the node is gone, or "
            "have an admin revoke its key (liver tokens list)"
        )
    changes = (
        update(TokenRow).where(earlier).values(revoked_at=now).execution_options(synchronize_session=False),
        delete(TokenRow).where(TokenRow.role == Role.NODE, TokenRow.node_id == node_id),
    )
    if sum(session.execute(change).rowcount for change in changes):  # type: ignore[attr-defined]
        # Else no token has ended: a fleet that joins must not have all tokens looked up again for each of its nodes.
        notify(session, [TOKENS])
    end_part(session, node_id, now=now)
    release_machine(session, node_id, now=now)
    if token.uses_left is not None:
        token.uses_left -= 1
    key = TokenRow(
        token_id=secrets.token_hex(6),
        role=Role.NODE_KEY,
        name=f"node {node_id}",
        secret_sha256=_hashed(secret),
        created_at=now,
        node_id=node_id,
        created_by=token.token_id,
    )
    session.add(key)
    session.flush()
    return key


def _may_still_report(key: TokenRow, node: NodeRow | None, now: datetime) -> bool:
    """Whether the agent with this key has just joined, and has not reported yet."""
    has_reported = node is not None and node.last_seen_at >= key.created_at
    return not has_reported and now - key.created_at < FIRST_REPORT_WITHIN


def issue_node_token(
    session: Session, node_id: str, *, token_s: float, created_by: str, now: datetime
) -> tuple[str, datetime]:
    """A token for a node, and when it expires. Those of the node that have expired are deleted."""
    session.execute(
        delete(TokenRow).where(TokenRow.role == Role.NODE, TokenRow.node_id == node_id, TokenRow.expires_at <= now)
    )
    expires_at = now + timedelta(seconds=token_s)
    _, token = create_token(
        session,
        role=Role.NODE,
        name=f"node {node_id}",
        now=now,
        expires_at=expires_at,
        node_id=node_id,
        created_by=created_by,
    )
    return token, expires_at


def ensure_first_tokens(session: Session, *, folder: Path, now: datetime) -> tuple[Path, ...]:
    """At the first start, create a token for an admin, for operators and for nodes that join, in `folder/NAME.token`
    (mode 0600). Returns the files at any start.

    A deleted file is not created again while its token exists: somebody deleted it on purpose.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = {role: folder / f"{name}.token" for role, name in FIRST.items()}
    for role, path in paths.items():
        former = folder / f"{_FORMER_FILES.get(role, '')}.token"
        if former.exists() and not path.exists():
            former.rename(path)
        name = f"first-{role}"
        if session.scalars(select(TokenRow).where(TokenRow.name == name).limit(1)).first() is None:
            _write_private(path, create_token(session, role=role, name=name, now=now)[1])
    return tuple(path for path in paths.values() if path.exists())


def _lock_node(session: Session, node_id: str) -> NodeRow | None:
    return session.scalars(select(NodeRow).where(NodeRow.node_id == node_id).with_for_update(key_share=True)).first()


def _locked(session: Session, token_id: str) -> TokenRow:
    row = session.scalars(select(TokenRow).where(TokenRow.token_id == token_id).with_for_update()).one_or_none()
    if row is None or row.role == Role.NODE:
        raise not_found("token", token_id)
    return row


def _write_private(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content + "\n")


def _hashed(secret: str) -> str:
    # The secret has 256 random bits, so a plain hash is enough: there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()
