"""Stores what agents measured of wires."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import delete
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.wires import WireFact
from service.wires.tables import WireRow

KEPT = timedelta(days=7)
"""Agents measure once an hour: what is older is of nodes that are gone."""


def store_wires(session: Session, facts: Sequence[WireFact], *, now: datetime) -> None:
    """Each replaces what was known of its two nodes, and what is old is deleted. The jobs are locked."""
    for fact in facts:
        known = {
            "wire": None if fact.speed is None else fact.speed.wire.value,
            "bytes_per_s": 0.0 if fact.speed is None else fact.speed.bytes_per_s,
            "latency_s": 0.0 if fact.speed is None else fact.speed.latency_s,
            "refused": [] if fact.speed is None else list(fact.speed.refused),
            "failed": fact.failed,
            "measured_at": min(fact.measured_utc, now),
        }
        statement = insert(WireRow).values(job_id=fact.job_id, target=fact.target, source=fact.source, **known)
        session.execute(statement.on_conflict_do_update(index_elements=["job_id", "target", "source"], set_=known))
    for job_id in sorted({fact.job_id for fact in facts}):
        session.execute(delete(WireRow).where(WireRow.job_id == job_id, WireRow.measured_at < now - KEPT))
