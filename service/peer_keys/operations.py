"""Changes the peer keys of jobs. A key is in no answer but orders, and in no log."""

import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from agent.protocol.sync import PeerKeyKept
from liver_core.layout.limits import listed
from service.audit.operations import note_own
from service.jobs.operations import lock_job, touch
from service.jobs.tables import ENDED, JobRow
from service.peer_keys.queries import due_jobs, ended_since_key, without_key
from service.peer_keys.rules import KeyStep, next_step
from service.problems import conflict

BATCH = 32
_KEEPS = text(
    """
    INSERT INTO peer_key_holders (job_id, node_id, number)
    SELECT jobs.job_id, :node_id, jobs.peer_key_number
      FROM unnest(CAST(:job_ids AS text[]), CAST(:numbers AS bigint[])) AS said (job_id, number)
      JOIN jobs ON jobs.job_id = said.job_id AND jobs.peer_key_number = said.number
     ORDER BY jobs.job_id
    ON CONFLICT (job_id, node_id) DO UPDATE SET number = excluded.number
     WHERE peer_key_holders.number < excluded.number
    """
)


def follow_grants(session: Session, *, now: datetime) -> int:
    """Take the next step with the keys of each job that has not ended. Returns how many changed."""
    # A job that is locked elsewhere is looked at next time. What was read before the lock is read again.
    locked = select(JobRow).where(JobRow.job_id.in_(due_jobs(session, now=now, most=BATCH))).order_by(JobRow.job_id)
    changed = 0
    for job in session.scalars(locked.with_for_update(skip_locked=True, key_share=True)).all():
        ended = ended_since_key(session, job.job_id, now=now)
        has_before = job.peer_key_before is not None
        match next_step(has_before=has_before, ended=ended, waiting=without_key(session, job.job_id, now=now)):
            case KeyStep.ROTATE:
                _rotate(session, job, now=now)
                because = f"the grant of {_named(ended)} has ended"
                note_own(session, "rotate_job_key", job.job_id, now=now, number=job.peer_key_number, because=because)
            case KeyStep.DROP:
                _drop(session, job, now=now)
                note_own(session, "drop_job_key", job.job_id, now=now, number=job.peer_key_number - 1)
            case KeyStep.KEEP:
                continue
        changed += 1
    return changed


def rotate_key(session: Session, job_id: str, *, now: datetime) -> JobRow:
    """Make a new key now. Raises 404, or 409 if the job has ended or the key before is still valid."""
    job = lock_job(session, job_id)
    if job.state in ENDED:
        raise conflict(f"job {job_id} has ended: it is {job.state}, and no agent uses its key")
    if job.peer_key_before is not None:
        waiting = without_key(session, job_id, now=now)
        since = f"{job.peer_key_at:%Y-%m-%d %H:%M:%S} UTC"
        who = f"{_named(waiting)} may not have the new one" if waiting else "it is about to be dropped"
        raise conflict(f"the key of job {job_id} was rotated at {since}, and the one before is still valid: {who}")
    _rotate(session, job, now=now)
    return job


def note_keeps(session: Session, node_id: str, kept: Iterable[PeerKeyKept]) -> None:
    """The node has said that it keeps these keys, of jobs that it has a part in. Only current ones count."""
    said = {item.job_id: item.number for item in kept}
    if said:
        session.execute(_KEEPS, {"node_id": node_id, "job_ids": list(said), "numbers": list(said.values())})


def _rotate(session: Session, job: JobRow, *, now: datetime) -> None:
    assert job.peer_key_before is None, "a node that is cut off may know no other key"
    job.peer_key, job.peer_key_before = secrets.token_urlsafe(32), job.peer_key
    job.peer_key_number += 1
    job.peer_key_at = now
    touch(session, job, now=now)


def _drop(session: Session, job: JobRow, *, now: datetime) -> None:
    job.peer_key_before = None
    touch(session, job, now=now)


def _named(node_ids: Sequence[str]) -> str:
    return f"{'node' if len(node_ids) == 1 else 'nodes'} {listed(node_ids)}"
