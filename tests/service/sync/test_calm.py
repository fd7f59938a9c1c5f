"""Calm reports: they store what others would, wait for no other report of their job, and notice what they overtake."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text

from agent.protocol.sync import LogChunk
from liver_core.handoff import RankStage
from service.jobs.tables import JobRow, JobState, JobStepRow, RankLogRow
from service.ledger.tables import IntervalRow
from service.sync import sifting
from service.sync.calm import Unsettled, store_progress
from tests.service.fake_agent import FakeAgent, step_row

WITHIN_S = 5.0


def work(agent: FakeAgent, step: int, clock, **more) -> dict:
    order = agent.job_order()
    assert order.generation is not None
    rank = agent.rank(order, stage=RankStage.TRAINING, step=step)
    rows = tuple(step_row(order.job_id, order.generation, each, clock(), **more) for each in (step - 1, step))
    log = LogChunk(job_id=order.job_id, generation=order.generation, rank=rank.rank, offset=step, text=f"step {step}\n")
    return {"ranks": (rank,), "steps": rows, "logs": (log,)}


@pytest.fixture
def tries(monkeypatch) -> list[bool]:
    """Of each report that may be calm, whether it is."""
    found: list[bool] = []
    try_calm = sifting.try_calm

    def noted(*arguments) -> bool:
        found.append(try_calm(*arguments))
        return found[-1]

    monkeypatch.setattr(sifting, "try_calm", noted)
    return found


def stored(context) -> tuple:
    with context.sessions() as session:
        job = session.scalars(select(JobRow)).one()
        steps = session.scalars(select(JobStepRow).order_by(JobStepRow.step)).all()
        logs = session.scalars(select(RankLogRow).order_by(RankLogRow.rank, RankLogRow.start_offset)).all()
        ledger = session.scalars(select(IntervalRow).order_by(IntervalRow.lease_id, IntervalRow.starts_at)).all()
        return (
            (job.state, job.last_step, job.last_step_at, job.highest_step, job.lost_steps),
            [(row.step, row.loss, row.tokens) for row in steps],
            [(row.rank, row.start_offset, row.text) for row in logs],
            [(row.lease_id, row.cause, row.starts_at, row.ends_at) for row in ledger],
        )


@pytest.mark.parametrize("calm", [True, False])
def test_a_calm_report_stores_what_any_other_would(running, context, clock, monkeypatch, tries, calm):
    _, agent, other = running
    if not calm:
        monkeypatch.setattr(sifting, "try_calm", lambda *_: False)
    for step in (2, 4, 6):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock, loss=float(step), tokens=step))
        clock.advance(1)
    assert tries == ([False, False, True, True, True, True] if calm else [])
    job, steps, logs, ledger = stored(context)
    at = clock().replace(second=clock().second - 1)
    assert job == (JobState.RUNNING, 6, at, 6, 0)
    assert steps == [(step, step + step % 2, step + step % 2) for step in range(1, 7)]
    assert [row[1:] for row in logs] == 2 * [(step, f"step {step}\n") for step in (2, 4, 6)]
    assert {(cause, ends_at) for _, cause, _, ends_at in ledger if cause == "productive"} == {("productive", at)}


def test_a_calm_report_does_not_wait_for_a_job_that_another_one_has_locked(running, context, clock, tries):
    job_id, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    with context.sessions.begin() as session, ThreadPoolExecutor(1) as pool:
        session.execute(text("SELECT 1 FROM jobs WHERE job_id = :job_id FOR NO KEY UPDATE"), {"job_id": job_id})
        # The job has made this step already; a report of more than that waits until it can be counted.
        taken = pool.submit(other.sync, **work(other, 4, clock))
        assert taken.result(timeout=WITHIN_S).accepted_report_seq == other.seq
    assert tries[-1]


def test_a_job_that_ends_while_a_calm_report_is_stored_is_looked_at_again(running, context, client, clock, monkeypatch):
    job_id, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    overtaken = []

    def late(intake) -> None:
        if intake.standing is not None and not overtaken:
            overtaken.append(client.post(f"/api/v1/jobs/{job_id}/stop").status_code)
            with context.sessions.begin() as session:
                session.get_one(JobRow, job_id).state = JobState.STOPPING
        try:
            store_progress(intake)
        except Unsettled:
            overtaken.append("unsettled")
            raise

    monkeypatch.setattr("service.sync.facts.store_progress", late)
    assert agent.sync(**work(agent, 6, clock)).jobs[0].desired == "stop"
    assert overtaken == [200, "unsettled"]
    (_, last_step, *_), steps, *_ = stored(context)
    assert (last_step, steps[-1][0]) == (6, 6)


@pytest.mark.parametrize("part", ["notices", "checkpoints", "finished", "another world", "another rank"])
def test_a_report_with_anything_else_is_not_calm(running, clock, tries, part):
    _, agent, other = running
    for step in (2, 4):
        agent.sync(**work(agent, step, clock))
        other.sync(**work(other, step, clock))
    parts = work(agent, 6, clock)
    order = agent.job_order()
    if part == "notices":
        parts["notices"] = (agent.notice(),)
    elif part == "checkpoints":
        from agent.protocol.sync import CheckpointFact

        fact = CheckpointFact(
            job_id=order.job_id, generation=1, step=6, path="/checkpoints/step-6", finished_utc=clock()
        )
        parts["checkpoints"] = (fact,)
    elif part == "finished":
        from agent.protocol.sync import JobFinished

        parts["finished"] = (JobFinished(job_id=order.job_id, generation=1, step=6),)
    elif part == "another world":
        parts["steps"] += (step_row(order.job_id, 2, 7, clock()),)
    else:
        parts["ranks"] = (agent.rank(order, stage=RankStage.BROKEN, step=6),)
    del tries[:]
    agent.sync(**parts)
    assert not any(tries)
