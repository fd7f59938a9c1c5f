"""What grows without end is kept within its limits, oldest first."""

from datetime import timedelta

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from service.jobs.tables import JobRow, JobStepRow, RankLogRow
from service.reconcilers import upkeep
from service.reconcilers.retention import Task
from service.reconcilers.runner import Reconcilers
from tests.service.fake_agent import JOB, another_job
from tests.service.waiting import until


def test_only_the_newest_steps_and_log_pieces_of_each_job_are_kept(client, context, clock, settings):
    object.__setattr__(settings, "step_rows_max", 100)
    object.__setattr__(settings, "log_chars_max", 1_000)
    full, small = (client.post("/api/v1/jobs", json=another_job(name)).json()["job_id"] for name in "ab")
    with context.sessions.begin() as session:
        for job_id, steps, pieces in ((full, 250, 40), (small, 50, 5)):
            session.get_one(JobRow, job_id).highest_step = steps
            session.add_all(_step(job_id, step, clock() + timedelta(seconds=step)) for step in range(1, steps + 1))
            session.add_all(_piece(job_id, number, clock()) for number in range(pieces))
    assert upkeep.tick(context) == (250 - 100) + (40 - 10)
    with context.sessions() as session:
        kept = session.scalars(select(JobStepRow.step).where(JobStepRow.job_id == full).order_by(JobStepRow.step)).all()
        assert kept == list(range(151, 251))
        pieces = session.scalars(select(RankLogRow.start_offset).where(RankLogRow.job_id == full)).all()
        assert sorted(pieces) == list(range(30, 40))
        assert session.scalar(select(func.count()).select_from(JobStepRow).where(JobStepRow.job_id == small)) == 50
    assert upkeep.tick(context) == 0


def test_a_task_that_fails_holds_up_no_other_and_readyz_names_it(client, context, clock, settings, monkeypatch):
    def fails(*_: object) -> int:
        raise ValueError("no such thing")

    for tasks in ("SUMS", "TASKS"):
        broken = Task(f"{tasks} that nobody can do", fails)
        monkeypatch.setattr(upkeep, tasks, (broken, *getattr(upkeep, tasks)))
    object.__setattr__(settings, "step_rows_max", 1)
    job_id = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
    with context.sessions.begin() as session:
        session.get_one(JobRow, job_id).highest_step = 3
        session.add_all(_step(job_id, step, clock() + timedelta(seconds=step)) for step in range(1, 4))
    look = upkeep.Upkeep(context)
    assert (look.tick(), look.is_behind) == (2, False)
    assert look.doubt == (
        "the upkeep of SUMS that nobody can do fails: no such thing; "
        "the upkeep of TASKS that nobody can do fails: no such thing"
    )
    reconcilers = Reconcilers(context)
    client.app.state.running.reconcilers = reconcilers
    reconcilers.start()
    try:
        until(lambda: "SUMS that nobody can do" in client.get("/readyz").json()["detail"])
        assert client.get("/readyz").json()["status"] == "ok", "what it does for jobs goes on"
    finally:
        reconcilers.stop()
        client.app.state.running.reconcilers = None
    monkeypatch.setattr(upkeep, "SUMS", ())
    monkeypatch.setattr(upkeep, "TASKS", (Task("SUMS that nobody can do", lambda *_: 0),))
    look.tick()
    assert look.doubt == "the upkeep of TASKS that nobody can do fails: no such thing"


def test_a_part_that_takes_the_database_too_long_is_halved_until_it_fits(context, monkeypatch):
    asked, left = [], [30]

    def work(session: Session, _settings: object, _now: object, most: int) -> int:
        asked.append(most)
        session.execute(text("SET LOCAL statement_timeout = 50"))
        session.execute(text("SELECT pg_sleep(CAST(:too_long AS int))"), {"too_long": int(most > 20)})
        taken = min(most, left[0])
        left[0] -= taken
        return taken

    monkeypatch.setattr(upkeep, "TASKS", (Task("rows", work, 64),))
    look = upkeep.Upkeep(context)
    for tried, behind, doubt in (([64], True, True), ([32], True, True), ([16] * 3, False, False)):
        asked.clear()
        look.tick()
        assert (asked, look.is_behind, "canceling statement" in look.doubt) == (tried, behind, doubt)
    look.tick()
    assert asked[-1] == 32, "it grows again, since the database may have been slow only once"


def test_a_database_that_is_away_is_no_fault_of_a_task(context, monkeypatch):
    def away(*_: object) -> int:
        raise OperationalError("SELECT 1", {}, ConnectionLost())

    monkeypatch.setattr(upkeep, "SUMS", (Task("rows", away),))
    look = upkeep.Upkeep(context)
    with pytest.raises(OperationalError):
        look.tick()
    assert look.doubt == ""


class ConnectionLost(Exception):
    sqlstate = "57P01"


def _step(job_id: str, step: int, at) -> JobStepRow:
    return JobStepRow(job_id=job_id, generation=1, step=step, seconds=1.0, finished_at=at)


def _piece(job_id: str, number: int, at) -> RankLogRow:
    return RankLogRow(job_id=job_id, generation=1, rank=0, start_offset=number, text="x" * 100, recorded_at=at)
