"""Tokens: only a hash is stored, files are private, revoked and expired ones do not work."""

import stat
from datetime import timedelta

from sqlalchemy import select

from service.tokens.operations import create_token, ensure_first_tokens, verify_token
from service.tokens.tables import Role, TokenRow


def test_a_token_is_known_by_its_secret_and_only_a_hash_is_stored(database, clock):
    with database.sessions.begin() as session:
        _, token = create_token(session, role=Role.OPERATOR, name="ci", now=clock())
        caller = verify_token(session, token, now=clock())
        assert caller is not None and (caller.role, caller.name) == (Role.OPERATOR, "ci")
        row = session.scalars(select(TokenRow)).one()
        assert token.split("_", 2)[2] not in row.secret_sha256
        assert verify_token(session, token[:-1] + ("A" if token[-1] != "A" else "B"), now=clock()) is None


def test_an_expired_or_revoked_token_does_not_work(database, clock):
    with database.sessions.begin() as session:
        row, token = create_token(session, role=Role.VIEWER, name="old", now=clock())
        row.expires_at = clock() + timedelta(seconds=5)
        assert verify_token(session, token, now=clock()) is not None
        assert verify_token(session, token, now=clock() + timedelta(seconds=5)) is None
        row.expires_at, row.revoked_at = None, clock()
        assert verify_token(session, token, now=clock()) is None


def test_the_first_tokens_are_written_once_to_files_that_only_their_owner_reads(database, clock, tmp_path):
    folder = tmp_path / "tokens"
    with database.sessions.begin() as session:
        files = ensure_first_tokens(session, folder=folder, now=clock())
        contents = [path.read_text() for path in files]
        assert [path.name for path in files] == ["admin.token", "operator.token", "join.token"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files[0].unlink()
        again = ensure_first_tokens(session, folder=folder, now=clock())
        assert [path.read_text() for path in again] == contents[1:]
