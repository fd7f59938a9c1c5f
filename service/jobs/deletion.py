"""Deletes a job that has ended: what there may be much of in parts, each a transaction; the rest in the last one."""

from collections.abc import Callable, Iterator

from sqlalchemy import delete, literal_column, select, text
from sqlalchemy.orm import Session, sessionmaker

from service.db.base import Base
from service.decisions.tables import DecisionRow
from service.handoffs.tables import HandoffRow
from service.jobs.operations import lock_job
from service.jobs.tables import ENDED, JobRow, JobStepRow, RankLogRow
from service.metrics.tables import StepMetricsRow
from service.problems import ProblemError, conflict, unavailable

PART_ROWS = 5_000
PARTS_MAX = 100
_MANY = (RankLogRow, JobStepRow, StepMetricsRow, HandoffRow, DecisionRow)


def parts_of_deletion(
    sessions: sessionmaker[Session], job_id: str, check: Callable[[JobRow], None]
) -> Iterator[Session]:
    """Delete the job; yields the last transaction, to write in it. The job is locked in each part, and `check` may
    refuse it. Raises 404; 409 if it has not ended, or goes on meanwhile; 503 if there is more than can be done at once.
    """
    for _ in range(PARTS_MAX):
        with sessions.begin() as session:
            check(_ended(session, job_id))
            if not any(_delete_some(session, table, job_id) for table in _MANY):
                _delete_rest(session, job_id)
                yield session
                return
    raise ProblemError(unavailable(f"job {job_id} has more rows than are deleted at once; delete it again"))


def _ended(session: Session, job_id: str) -> JobRow:
    job = lock_job(session, job_id)
    if job.state not in ENDED:
        raise conflict(f"job {job_id} has not ended: it is {job.state}; stop it first")
    return job


def _delete_some(session: Session, table: type[Base], job_id: str) -> int:
    place = literal_column("ctid")
    some = select(place).select_from(table).where(table.__table__.c.job_id == job_id).limit(PART_ROWS)
    statement = delete(table).where(place.in_(some)).execution_options(synchronize_session=False)
    return session.connection().execute(statement).rowcount


def _delete_rest(session: Session, job_id: str) -> None:
    """Whatever refers to the job, and the job. It refers to its active generation, so that this comes off first."""
    values = {"job_id": job_id}
    session.execute(text("UPDATE jobs SET active_generation = NULL WHERE job_id = :job_id"), values)
    for table in reversed(Base.metadata.sorted_tables):
        if any(key.column.table.name == JobRow.__tablename__ for key in table.foreign_keys):
            session.execute(delete(table).where(table.c.job_id == job_id))
    session.execute(text("DELETE FROM jobs WHERE job_id = :job_id"), values)
    session.expunge_all()
