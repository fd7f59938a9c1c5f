"""A connection that was lost while it lay in the pool must not fail who takes it next."""

import pytest
from sqlalchemy import text

from service.db import engine as module
from service.db.engine import UNASKED_S_MAX, Database


@pytest.fixture
def moments(monkeypatch) -> list[float]:
    """The time by which connections count as recently used; tests set its one item."""
    now = [1_000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def pings(database: Database, monkeypatch) -> list[object]:
    """Every connection that is asked whether it lives."""
    asked: list[object] = []
    ping = database.engine.dialect.do_ping
    monkeypatch.setattr(
        database.engine.dialect, "do_ping", lambda connection: asked.append(connection) or ping(connection)
    )
    return asked


def pid(database: Database) -> int:
    with database.sessions() as session:
        return session.execute(text("SELECT pg_backend_pid()")).scalar_one()


@pytest.mark.parametrize("idle_s", [0.0, UNASKED_S_MAX, 3_600.0])
def test_a_connection_that_the_server_ended_is_replaced_without_an_error(moments, database, idle_s):
    with database.engine.connect() as one, database.engine.connect() as other:
        lost = [connection.execute(text("SELECT pg_backend_pid()")).scalar_one() for connection in (one, other)]
    admin = module.connect(database.engine.url, pool_size=1)
    with admin.sessions() as session:
        for each in lost:
            assert session.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": each}).scalar_one()
    admin.close()
    moments[0] += idle_s
    with database.engine.connect() as one, database.engine.connect() as other:
        found = [connection.execute(text("SELECT pg_backend_pid()")).scalar_one() for connection in (one, other)]
    assert not set(found) & set(lost)


def test_the_server_is_asked_only_after_a_second_without_use(moments, database, pings):
    first = pid(database)
    moments[0] += UNASKED_S_MAX - 0.01
    assert (pid(database), len(pings)) == (first, 0)
    moments[0] += UNASKED_S_MAX
    assert (pid(database), len(pings)) == (first, 1)
