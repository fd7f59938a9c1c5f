"""Books the time in which a job's world stands still, once that is known, from its last step on."""

import logging
from collections import defaultdict
from datetime import datetime

from sqlalchemy.orm import Session

from service.jobs.stalls import Standstill
from service.jobs.tables import GenerationRow, JobRow
from service.ledger.operations import recast_slots
from service.ledger.rules import Part, Spent
from service.ledger.tables import Cause

_log = logging.getLogger(__name__)


def note_standstill(session: Session, job: JobRow, found: Standstill | None, *, now: datetime) -> None:
    """Store whether the job makes no step, which reports go by from now on. What its slots did since the last one is
    put right where its world stands still. The job is locked."""
    stood, known = job.is_stalled, None if job.standstill is None else job.standstill["because"]
    if found is not None and found.because != known:
        _log.warning("job %s: no step after step %d: %s", job.job_id, job.last_step, found.because)
    job.standstill = None if found is None else found.as_json()
    if found is None or stood or not job.is_stalled:
        return
    row = session.get(GenerationRow, (job.job_id, job.active_generation))
    if row is None or found.since >= now:
        return
    slots: dict[str, list[int]] = defaultdict(list)
    for member in row.roster["members"]:
        slots[member["node_id"]].append(member["slot"])
    part = Part(found.since, now, Spent(Cause.STALLED, job.job_id, row.generation))
    for node_id, of_node in sorted(slots.items()):
        recast_slots(session, node_id=node_id, by_slot=dict.fromkeys(of_node, (part,)))
