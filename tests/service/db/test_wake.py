"""Wake-ups: sent when a transaction commits, never when it is rolled back, and in pieces that fit one notification."""

import psycopg
import pytest

from service.db.wake import CHANNEL, PAYLOAD_CHARS_MAX, job_topic, node_topic, notify


@pytest.fixture
def listener(database):
    url = database.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        yield connection


def heard(listener: psycopg.Connection) -> list[str]:
    return [item.payload for item in listener.notifies(timeout=0.5)]


def test_waiters_are_woken_by_a_commit_and_not_by_a_rollback(database, listener):
    with database.sessions() as session:
        notify(session, [job_topic("never")])
        session.rollback()
    with database.sessions.begin() as session:
        notify(session, [job_topic("a"), node_topic("n1"), node_topic("n1")])
    assert heard(listener) == ["job/a,node/n1"]


def test_ten_thousand_nodes_are_woken_in_notifications_that_fit(database, listener):
    topics = [node_topic(f"node-{number:05}") for number in range(10_000)]
    with database.sessions.begin() as session:
        notify(session, topics)
    payloads = heard(listener)
    assert [topic for payload in payloads for topic in payload.split(",")] == topics
    assert max(map(len, payloads)) <= PAYLOAD_CHARS_MAX
