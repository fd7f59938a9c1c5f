"""Facts about a generation that the service does not know yet wait here for the report of the handoff that made it."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.sync import CheckpointFact, HandoffMirror, JobFinished, LogChunk, MetricsRow, StepRow
from service.jobs.tables import HeldFactRow

HELD_FACTS_MAX = 2_048
HELD_LOGS_MAX = 128
"""So many facts, and pieces of logs, of one node about one job wait; more of them are refused."""
HELD_FOR_S = 600.0

MODELS = {
    "steps": StepRow,
    "logs": LogChunk,
    "checkpoints": CheckpointFact,
    "finished": JobFinished,
    "handoffs": HandoffMirror,
    "metrics": MetricsRow,
}
Fact = StepRow | LogChunk | CheckpointFact | JobFinished | HandoffMirror | MetricsRow


def hold(
    session: Session, node_id: str, items: Iterable[tuple[str, Fact]], *, now: datetime
) -> Sequence[tuple[str, Fact]]:
    """Keep these parts of a report of the node, as (part, fact). Returns those for which there is no room."""
    left: list[tuple[str, Fact]] = []
    rows: list[dict[str, object]] = []
    counts: dict[tuple[str, bool], int] = {}
    for part, fact in items:
        key = fact.job_id, part == "logs"
        if key not in counts:
            counts[key] = _count(session, node_id, *key)
        if counts[key] >= (HELD_LOGS_MAX if part == "logs" else HELD_FACTS_MAX):
            left.append((part, fact))
            continue
        counts[key] += 1
        told = {"job_id": fact.job_id, "node_id": node_id, "generation": fact.generation, "held_at": now}
        rows.append({**told, "part": part, "fact": _without_nul(fact).model_dump(mode="json")})
    if rows:
        session.execute(insert(HeldFactRow).values(rows))
    return left


def waiting(session: Session, job_ids: Iterable[str]) -> Sequence[HeldFactRow]:
    """What waits for handoffs of these jobs, in the order in which it came."""
    wanted = select(HeldFactRow).where(HeldFactRow.job_id.in_(sorted(job_ids)))
    return session.scalars(wanted.order_by(HeldFactRow.held_id)).all()


def fact_of(row: HeldFactRow) -> Fact:
    """The fact as it was reported."""
    return MODELS[row.part].model_validate(row.fact, strict=False)


def drop(session: Session, rows: Iterable[HeldFactRow]) -> None:
    """They wait no longer."""
    held_ids = [row.held_id for row in rows]
    if held_ids:
        gone = delete(HeldFactRow).where(HeldFactRow.held_id.in_(held_ids))
        session.execute(gone.execution_options(synchronize_session=False))


def expire(connection: Connection, *, now: datetime, most: int) -> int:
    """Drop up to `most` facts that have waited too long. Returns how many."""
    old = select(HeldFactRow.held_id).where(HeldFactRow.held_at < now - timedelta(seconds=HELD_FOR_S)).limit(most)
    return connection.execute(delete(HeldFactRow).where(HeldFactRow.held_id.in_(old))).rowcount


def _count(session: Session, node_id: str, job_id: str, is_log: bool) -> int:
    is_mine = (HeldFactRow.job_id == job_id) & (HeldFactRow.node_id == node_id)
    of_part = HeldFactRow.part == "logs" if is_log else HeldFactRow.part != "logs"
    return session.execute(select(func.count()).where(is_mine, of_part)).scalar_one()


def _without_nul(fact: Fact) -> Fact:
    """PostgreSQL keeps no NUL in a text; a log may hold one."""
    return fact.model_copy(update={"text": fact.text.replace("\x00", "")}) if isinstance(fact, LogChunk) else fact
