"""Wake-ups: sent when a transaction commits, never when it is rolled back, and in pieces that fit one notification."""

import threading
import time
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import func, insert, select

from agent.protocol.jobfile import JobFile
from service.db import wake
from service.db.wake import CHANNEL, ORDERS_FIRST_S, PAYLOAD_CHARS_MAX, WakeHub, job_topic, node_topic, notify
from service.jobs.operations import submit_job, touch
from service.jobs.tables import JobMemberRow, JobRow, MemberRole
from service.nodes.tables import NodeRow
from tests.service.fake_agent import JOB


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


def test_a_change_of_a_job_wakes_all_its_members_but_the_one_that_asks_in_notifications_that_fit(context, listener):
    names = [f"{'n' * 58}{number:05}" for number in range(300)]
    node = {"provider": "none", "pool": "p", "slots": 1, "peer_url": "http://a", "private_address": "127.0.0.1"}
    node |= {"device": "cpu", "agent_version": "t", "agent_incarnation": UUID(int=1), "report_seq": 0, "state": "ready"}
    with context.sessions.begin() as session:
        job = submit_job(session, JobFile.model_validate(JOB), now=context.clock())
        times = {"first_seen_at": context.clock(), "last_seen_at": context.clock(), "ranks": []}
        session.execute(insert(NodeRow), [node | times | {"node_id": name} for name in names])
        rows = [{"job_id": job.job_id, "node_id": name, "role": MemberRole.MEMBER} for name in names]
        session.execute(insert(JobMemberRow), rows)
        before = job.orders_seq
    heard(listener)
    with context.sessions.begin() as session:
        job = session.get_one(JobRow, job.job_id)
        touch(session, job, now=context.clock(), asker=names[7])
    payloads = heard(listener)
    topics = [topic for payload in payloads for topic in payload.split(",")]
    assert topics == [job_topic(job.job_id), *(node_topic(name) for name in names if name != names[7])]
    assert len(payloads) > 1 and max(map(len, payloads)) <= PAYLOAD_CHARS_MAX
    assert job.orders_seq > before


def test_the_reconcilers_look_a_moment_after_agents_are_woken(database):
    hub = WakeHub(database.engine.url, database.outage)
    began = time.monotonic()
    hub._dispatch("job/a,node/n1")
    hub.wait_for_reconcilers(10.0)
    assert ORDERS_FIRST_S <= time.monotonic() - began < 5.0
    hub._dispatch("node/n1")
    began = time.monotonic()
    hub.wait_for_reconcilers(0.1)
    assert time.monotonic() - began >= 0.1, "nothing of a job has changed"


def test_who_listens_is_woken_by_a_change_and_by_the_end_at_once(database, monkeypatch):
    """A service that ends waits for it, and every test that has a service."""
    monkeypatch.setattr(wake, "LOOK_S", 60.0)
    connected, changed = threading.Event(), threading.Event()
    monkeypatch.setattr(database.outage, "ends", connected.set)
    hub = WakeHub(database.engine.url, database.outage)
    hub.call_at("job/a", changed.set)
    hub.start()
    assert connected.wait(20.0)
    with database.engine.begin() as connection:
        connection.execute(select(func.pg_notify(CHANNEL, "job/a")))
    assert changed.wait(20.0)
    hub.stop(timeout_s=20.0)
    assert not hub._thread.is_alive()
