"""Keeps incidents without a notice, and what a job says of those that are open."""

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from liver_core.layout.limits import fitting
from service.incidents.tables import IncidentKind, JobIncidentRow
from service.jobs.tables import ENDED, JobRow


def record(
    session: Session,
    job: JobRow,
    kind: IncidentKind,
    *,
    at: datetime,
    reason: str,
    generation: int | None = None,
    step: int | None = None,
    node_id: str | None = None,
    rank: int | None = None,
    lost_steps: int = 0,
) -> None:
    """What went wrong at `at`, as part of the open incident of this kind if there is one. `step`: after which, or of
    the checkpoint. Several nodes tell of one failure: what is known of this generation and step changes nothing.
    A loss or a hang is over at once, since the world ends by it. Of a job that has ended none is opened. The caller
    holds the job's row."""
    row = _open(session, job.job_id, kind)
    told = {
        "reason": fitting(reason),
        "last_at": at,
        "generation": generation,
        "step": step,
        "node_id": node_id,
        "rank": rank,
    }
    if row is None:
        over_at = None if kind is IncidentKind.CHECKPOINT else at
        if over_at is None and job.state in ENDED:
            return
        row = JobIncidentRow(job_id=job.job_id, kind=kind, began_at=at, over_at=over_at, lost_steps=lost_steps, **told)
        session.add(row)
    elif (row.generation, row.step) == (generation, step) or at < row.last_at:
        return
    else:
        row.times += 1
        row.lost_steps += lost_steps
        for name, value in told.items():
            setattr(row, name, value)
    session.flush()
    _warn(session, job)


def settle(session: Session, job: JobRow, kind: IncidentKind, *, at: datetime) -> None:
    """What went wrong in this way until `at` is over. The caller holds the job's row."""
    row = _open(session, job.job_id, kind)
    if row is not None and row.last_at <= at:
        row.over_at = at
        session.flush()
        _warn(session, job)


def settle_all(session: Session, job: JobRow, *, at: datetime) -> None:
    """The job has ended at `at`: whatever went wrong with it is over. The caller holds the job's row."""
    is_open = JobIncidentRow.over_at.is_(None)
    session.execute(update(JobIncidentRow).where(JobIncidentRow.job_id == job.job_id, is_open).values(over_at=at))
    job.warning = ""


def add_lost(session: Session, job_id: str, generation: int | None, more: int) -> None:
    """The end of this world has cost `more` steps than was known, or fewer where that is negative. Where it is no
    incident, nothing changes. The caller holds the job's row."""
    of_world = JobIncidentRow.job_id == job_id, JobIncidentRow.generation == generation
    ends = JobIncidentRow.kind.in_((IncidentKind.LOSS, IncidentKind.HANG))
    newest = select(JobIncidentRow).where(*of_world, ends).order_by(JobIncidentRow.incident_id.desc()).limit(1)
    if (row := session.scalars(newest).first()) is not None:
        row.lost_steps = max(0, row.lost_steps + more)


def _open(session: Session, job_id: str, kind: IncidentKind) -> JobIncidentRow | None:
    statement = select(JobIncidentRow).where(JobIncidentRow.job_id == job_id, JobIncidentRow.over_at.is_(None))
    return session.scalars(statement.where(JobIncidentRow.kind == kind)).first()


def _warn(session: Session, job: JobRow) -> None:
    """Say in the job's row what is open."""
    statement = select(JobIncidentRow).where(JobIncidentRow.job_id == job.job_id, JobIncidentRow.over_at.is_(None))
    job.warning = "; ".join(in_words(row) for row in session.scalars(statement.order_by(JobIncidentRow.incident_id)))


def in_words(row: JobIncidentRow) -> str:
    """One that is open, in a clause for people."""
    many = "a checkpoint" if row.times == 1 else f"{row.times} checkpoints in a row"
    return f"{many} failed, the last at step {row.step}: {row.reason}"
