"""Whether changes can be stored: asked by writing, and not at every request."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from service.db.writing import ASK_AGAIN_S, WriteCheck
from service.repeats.tables import AnswerRow


def test_a_database_that_takes_changes_keeps_none_of_these(database):
    assert WriteCheck(database.sessions, None).trouble() == ""
    with database.sessions() as session:
        assert session.scalar(select(func.count()).select_from(AnswerRow)) == 0


def test_a_database_that_is_read_only_makes_the_service_not_ready(client, context, database, database_url):
    assert client.get("/readyz").status_code == 200
    now_s = [0.0]
    object.__setattr__(context, "writing", WriteCheck(database.sessions, None, now_s=lambda: now_s[0]))
    assert client.get("/readyz").status_code == 200
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"ALTER DATABASE {database_url.database} SET default_transaction_read_only = on"))
    database.engine.dispose()
    assert client.get("/readyz").status_code == 200, "it is not asked at every request"
    now_s[0] += ASK_AGAIN_S
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert answer.json()["detail"] == "the database takes no changes: it is read-only, or a standby"


def test_a_disk_without_room_makes_the_service_not_ready(database, tmp_path: Path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**7, 10**7))
    trouble = WriteCheck(database.sessions, tmp_path).trouble()
    assert trouble == f"the disk of {tmp_path} has 9 MiB free, at least 64 MiB are needed: make room"
    assert WriteCheck(database.sessions, None).trouble() == "", "the disk of a given server is its own matter"


@pytest.mark.parametrize(
    ("state", "trouble"),
    [("53100", "the database's disk is full: make room on it"), ("42501", "the database cannot be written: not so")],
)
def test_what_the_database_says_of_a_write_is_said_by_readyz(database, state, trouble):
    """By a trigger, which is the only way to have PostgreSQL raise these here."""
    with database.engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN RAISE EXCEPTION 'not so' USING ERRCODE = '{state}'; END $$"
            )
        )
        connection.execute(text("CREATE TRIGGER r BEFORE INSERT ON answers FOR EACH ROW EXECUTE FUNCTION refuse()"))
    assert WriteCheck(database.sessions, None).trouble() == trouble
