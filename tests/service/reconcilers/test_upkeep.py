"""What grows without end is kept within its limits, oldest first."""

from datetime import timedelta

from sqlalchemy import func, select

from service.jobs.tables import JobRow, JobStepRow, RankLogRow
from service.reconcilers import upkeep
from tests.service.fake_agent import JOB


def test_only_the_newest_steps_and_log_pieces_of_each_job_are_kept(client, context, clock, settings):
    object.__setattr__(settings, "step_rows_max", 100)
    object.__setattr__(settings, "log_chars_max", 1_000)
    full, small = (client.post("/api/v1/jobs", json=JOB).json()["job_id"] for _ in range(2))
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


def _step(job_id: str, step: int, at) -> JobStepRow:
    return JobStepRow(job_id=job_id, generation=1, step=step, seconds=1.0, finished_at=at)


def _piece(job_id: str, number: int, at) -> RankLogRow:
    return RankLogRow(job_id=job_id, generation=1, rank=0, start_offset=number, text="x" * 100, recorded_at=at)
