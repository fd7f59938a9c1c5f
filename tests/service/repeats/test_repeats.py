"""A request that is sent again under its key is carried out once, whatever became of the first answer."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic

import psycopg
import pytest
from sqlalchemy import func, select, text

from service.audit.tables import AuditRow
from service.jobs import endpoints
from service.jobs.tables import JobRow
from service.reconcilers import upkeep
from service.repeats.operations import KEPT
from service.repeats.tables import AnswerRow
from service.tokens.tables import TokenRow
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB_OF_MANY as JOB


@pytest.fixture
def count(context):
    def rows(table: type) -> int:
        with context.sessions() as session:
            return session.scalar(select(func.count()).select_from(table)) or 0

    return rows


def submit(client, key: str, content: dict = JOB, headers: dict[str, str] | None = None):
    return client.post("/api/v1/jobs", json=content, headers={"Idempotency-Key": key, **(headers or {})})


def test_the_same_request_under_the_same_key_makes_one_job_and_gets_the_same_answer(client, settings, count):
    first, second = submit(client, "a"), submit(client, "a")
    assert (first.status_code, first.content) == (second.status_code, second.content) == (201, first.content)
    assert "Idempotency-Replayed" not in first.headers and second.headers["Idempotency-Replayed"] == "true"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert count(JobRow) == count(AuditRow) == 1
    others = (
        submit(client, "b"),
        submit(client, "a", headers=bearer(settings, "admin")),
        client.post("/api/v1/jobs", json=JOB),
    )
    assert len({first.json()["job_id"], *(other.json()["job_id"] for other in others)}) == 4


def test_another_request_under_a_used_key_is_refused_by_name(client, count):
    job_id = submit(client, "a").json()["job_id"]
    path = f"/api/v1/jobs/{job_id}/stop"
    for answer in (submit(client, "a", JOB | {"name": "x"}), client.post(path, headers={"Idempotency-Key": "a"})):
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "Idempotency-Key"
    for bad in ("", "two words", "x" * 256, "\x7f"):
        assert submit(client, bad).json()["errors"][0]["field"] == "Idempotency-Key", bad
    assert count(JobRow) == 1 and client.get(f"/api/v1/jobs/{job_id}").json()["state"] == "pending"


def test_of_two_that_come_at_once_the_second_waits_for_the_answer_of_the_first(client, context, count, monkeypatch):
    is_first, real = threading.Lock(), endpoints.submit_job

    def once_another_waits(session, job_file, *, now):
        deadline = monotonic() + 20
        if is_first.acquire(blocking=False):
            with context.sessions() as other:
                waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
                while other.scalar(waiting) == 0 and monotonic() < deadline:
                    other.rollback()
        return real(session, job_file, now=now)

    monkeypatch.setattr(endpoints, "submit_job", once_another_waits)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: submit(client, "a"), range(2))
    assert first.status_code == second.status_code == 201 and first.content == second.content
    assert count(JobRow) == 1


def test_what_failed_has_changed_nothing_and_is_tried_again_under_its_key(client, count):
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    saved = {"url": f"/api/v1/jobs/{job_id}/checkpoint", "headers": {"Idempotency-Key": "a"}}
    assert client.post(**saved).status_code == client.post(**saved).status_code == 409
    assert count(AnswerRow) == 0


def test_an_answer_is_kept_for_a_day(client, context, clock, count):
    first = submit(client, "a").json()["job_id"]
    clock.advance(KEPT.total_seconds() - 1)
    assert submit(client, "a").json()["job_id"] == first
    clock.advance(1)
    second = submit(client, "a").json()["job_id"]
    assert second != first and submit(client, "a").json()["job_id"] == second
    submit(client, "b")
    clock.advance(timedelta(hours=25).total_seconds())
    assert upkeep.tick(context) == 2 and count(AnswerRow) == 0


def test_a_secret_is_not_kept_so_that_a_repeat_says_that_it_was_made(client, context, settings, count):
    headers = {**bearer(settings, "admin"), "Idempotency-Key": "a"}
    made = client.post("/api/v1/tokens", json={"role": "viewer", "name": "ci"}, headers=headers)
    before = count(TokenRow)
    again = client.post("/api/v1/tokens", json={"role": "viewer", "name": "ci"}, headers=headers)
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    assert again.status_code == 409 and "has a secret in it" in again.json()["detail"]
    with context.sessions() as session:
        assert session.scalars(select(AnswerRow)).one().body is None
    assert count(TokenRow) == before
    revoke = {"url": f"/api/v1/tokens/{made.json()['token_id']}/revoke", "headers": headers | {"Idempotency-Key": "b"}}
    assert client.post(**revoke).content == client.post(**revoke).content


def test_a_commit_whose_answer_is_lost_is_not_called_unchanged_and_is_found_again(client, context, count, monkeypatch):
    dialect = context.database.readers_engine.dialect

    def lost(connection, real=dialect.do_commit):
        real(connection)
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patched:
        patched.setattr(dialect, "do_commit", lost)
        answer = submit(client, "a")
    assert answer.status_code == 503 and "whether anything was changed is not known" in answer.json()["detail"]
    assert count(JobRow) == 1
    assert submit(client, "a").status_code == 201
    assert count(JobRow) == 1
