"""A node that can be had is looked at for all jobs at once, also for those whose rows are locked at that moment."""

import threading
from datetime import timedelta

from sqlalchemy import select

from service.jobs.tables import JobRow
from service.jobs.waking import wake_all, wake_late

HELD_S = 1.0


def look_in(context, clock, job_id: str, seconds: float = 30.0) -> None:
    """The job trains, nothing is to do, and the reconciler looks again after so long."""
    with context.sessions.begin() as session:
        session.get_one(JobRow, job_id).due_at = clock() + timedelta(seconds=seconds)


def is_due(context, clock, job_id: str) -> bool:
    with context.sessions() as session:
        return session.get_one(JobRow, job_id).due_at <= clock()


def test_a_node_that_is_to_be_had_again_makes_jobs_due_at_once(running, client, context, make_agent, clock):
    job_id, *_ = running
    make_agent("c").sync()
    client.post("/api/v1/nodes/c/drain", json={"in_s": 60}).raise_for_status()
    clock.advance(1)
    look_in(context, clock, job_id)
    client.post("/api/v1/nodes/c/undrain").raise_for_status()
    assert is_due(context, clock, job_id)
    client.post("/api/v1/nodes/c/drain", json={"in_s": 60}).raise_for_status()
    number = client.get("/api/v1/notices", params={"node_id": "c"}).json()[0]["notice_id"]
    clock.advance(1)
    look_in(context, clock, job_id)
    client.post(f"/api/v1/notices/{number}/end").raise_for_status()
    assert is_due(context, clock, job_id)


def test_jobs_whose_rows_are_locked_are_passed_over_and_woken_late(running, context, clock):
    job_id, *_ = running
    look_in(context, clock, job_id)
    with context.sessions.begin() as holder:
        holder.scalars(select(JobRow).where(JobRow.job_id == job_id).with_for_update(key_share=True)).one()
        with context.sessions.begin() as session:
            assert wake_all(session, now=clock()) == (job_id,)
    assert not is_due(context, clock, job_id)
    with context.sessions.begin() as session:
        wake_late(session, (job_id,), now=clock())
    assert is_due(context, clock, job_id)


def test_a_node_that_joins_while_a_job_is_locked_makes_it_due_all_the_same(running, context, make_agent, clock):
    job_id, *_ = running
    look_in(context, clock, job_id)
    joins = threading.Thread(target=lambda: make_agent("c").sync())
    with context.sessions.begin() as holder:
        holder.scalars(select(JobRow).where(JobRow.job_id == job_id).with_for_update(key_share=True)).one()
        joins.start()
        joins.join(HELD_S)
    joins.join(30)
    assert not joins.is_alive()
    assert is_due(context, clock, job_id)
