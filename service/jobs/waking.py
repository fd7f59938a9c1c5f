"""Has the reconcilers look at all jobs when a node can be had: whichever has not ended may want it."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from service.db.wake import RECONCILERS, notify
from service.jobs.operations import lock_jobs
from service.jobs.tables import ENDED, JobRow


def wake_all(session: Session, *, but: Collection[str] = (), now: datetime) -> tuple[str, ...]:
    """Make all jobs due that have not ended, but for some that the caller sees to. Rows that are locked elsewhere are
    passed over, since waiting for them here could deadlock. Returns their ids, for `wake_late`."""
    wanted = JobRow.due_at.is_not(None), JobRow.job_id.not_in(but)
    found = session.scalars(select(JobRow.job_id).where(*wanted)).all()
    locked = select(JobRow.job_id).where(*wanted).order_by(JobRow.job_id)
    free = session.scalars(locked.with_for_update(skip_locked=True, key_share=True)).all()
    due = update(JobRow).where(JobRow.job_id.in_(free)).values(due_at=now)
    session.execute(due.execution_options(synchronize_session=False))
    notify(session, [RECONCILERS])
    return tuple(sorted(set(found) - set(free)))


def wake_late(session: Session, job_ids: Collection[str], *, now: datetime) -> None:
    """Make those due that were passed over. In a transaction of its own, which holds no other lock and can wait."""
    for job in lock_jobs(session, job_ids):
        if job.state not in ENDED:
            job.due_at = now
    notify(session, [RECONCILERS])
