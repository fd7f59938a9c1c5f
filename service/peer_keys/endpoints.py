"""REST of a job's peer keys: make a new one now. No answer has a key."""

from fastapi import APIRouter

from liver_core.layout.limits import JobId
from service.audit.operations import note
from service.context import PERSON_ONLY, ContextOf, OperatorOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.jobs.queries import active_row
from service.jobs.schemas import JobSummary
from service.peer_keys.operations import rotate_key

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


@router.post("/{job_id}/rotate-key", operation_id="rotate_job_key", summary="Give a job's agents a new key")
def rotate(context: ContextOf, session: SessionOf, actor: OperatorOf, job_id: JobId) -> JobSummary:
    """For what agents of the job say to each other. The key before stays valid until each node that has a part in the
    job has the new one; the audit log says when. 409 as long as it is, and for a job that has ended."""
    now = context.clock()
    row = rotate_key(session, job_id, now=now)
    note(session, actor, "rotate_job_key", job_id, now=now, number=row.peer_key_number)
    return JobSummary.of(row, active_row(session, row))
