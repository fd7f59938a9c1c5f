"""What counts as an outage of the database, and what the log has of it."""

import logging

from sqlalchemy import text

from tests.service.fake_agent import JOB
from tests.service.waiting import until


def test_a_transaction_that_the_server_ended_since_it_rested_is_an_outage_in_one_line(
    client, context, monkeypatch, caplog
):
    def rests(session, *_args, **_more) -> None:
        session.execute(text("SET LOCAL idle_in_transaction_session_timeout = 20"))
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        alive = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
        # In one transaction PostgreSQL shows the activity of its beginning.
        with context.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
            until(lambda: other.execute(alive, {"pid": pid}).scalar_one() == 0)
        session.execute(text("SELECT 1"))

    monkeypatch.setattr("service.jobs.endpoints.submit_job", rests)
    answer = client.post("/api/v1/jobs", json=JOB)
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "idle-in-transaction timeout" in record.getMessage() and record.exc_info is None
