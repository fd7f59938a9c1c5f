"""What a replay takes from the database: a registered job, what its steps took, nodes as the service has had them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile import JobFile
from service.jobs.queries import job_file_of
from service.jobs.tables import ENDED, JobRow
from service.leases.tables import LeaseRow
from service.metrics.step_times import step_seconds
from service.nodes.tables import NodeRow, NodeState
from service.problems import invalid

LEASES_MAX = 50_000
JOBS_OF_A_NAME_MAX = 100


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A registered job, and the seconds of a step by layout, of those in which it has run."""

    job: JobFile
    measured: tuple[tuple[str, float], ...]


def known_job(session: Session, text: str) -> KnownJob:
    """By its id, or else its name: of several the newest that goes on, or else the newest. Raises 422."""
    statement = (
        select(JobRow)
        .where(or_(JobRow.job_id == text, JobRow.name == text))
        .order_by((JobRow.job_id == text).desc(), JobRow.created_at.desc())
        .limit(JOBS_OF_A_NAME_MAX)
    )
    rows = session.scalars(statement).all()
    if not rows:
        raise invalid(FieldProblem(field="job", rule=f"there is no job with the id or name {text!r}"))
    going_on = (row for row in rows if row.state not in ENDED)
    row = rows[0] if rows[0].job_id == text else next(going_on, rows[0])
    return KnownJob(job_file_of(row), step_seconds(session, row.job_id))


def node_kind(session: Session) -> tuple[int, str] | None:
    """Slots and device of most nodes that are there now; None without nodes."""
    statement = select(NodeRow.slots, NodeRow.device).where(NodeRow.state != NodeState.GONE).limit(LEASES_MAX)
    kinds = [(row.slots, row.device) for row in session.execute(statement)]
    return max(sorted(set(kinds)), key=kinds.count, default=None)


def own_events(session: Session, *, hours: int, now: datetime) -> str:
    """The nodes that the service had in the last hours, as rows of `ms,add|remove,node`; empty where it had
    none. Every lease is a node of its own: that a machine came back under its old name does not matter to a job."""
    begin = now - timedelta(hours=hours)
    statement = (
        select(LeaseRow.lease_id, LeaseRow.started_at, LeaseRow.ended_at)
        .where(or_(LeaseRow.ended_at.is_(None), LeaseRow.ended_at > begin))
        .order_by(LeaseRow.started_at.desc())
        .limit(LEASES_MAX)
    )
    return "\n".join(f"{at_ms},{what},{name}" for at_ms, what, name in _events(session.execute(statement), begin, now))


def _events(rows: Iterable, begin: datetime, now: datetime) -> list[tuple[int, str, str]]:
    found: list[tuple[int, str, str]] = []
    for lease_id, started_at, ended_at in rows:
        name = f"lease-{lease_id}"
        starts_ms = max(0, int((started_at - begin).total_seconds() * 1_000))
        ends_ms = int(((ended_at or now) - begin).total_seconds() * 1_000)
        if ends_ms <= starts_ms:
            continue
        found.append((starts_ms, "add", name))
        if ended_at is not None:
            found.append((ends_ms, "remove", name))
    return sorted(found)
