"""Stores what agents measured of wires."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.wires import WireFact
from service.wires.tables import WireRow

KEPT = timedelta(days=1)
"""Agents measure once an hour: what is older is of nodes that are gone, or of pairs that read each other no more."""


def store_wires(session: Session, facts: Sequence[WireFact], *, now: datetime) -> None:
    """Each replaces what was known of its two nodes; a failure leaves the last figures. What is old is deleted. The
    jobs are locked."""
    for fact in facts:
        measured_at = min(fact.measured_utc, now)
        known: dict[str, Any] = {"failed": fact.failed}
        if (speed := fact.speed) is not None:
            figures = {"bytes_per_s": speed.bytes_per_s, "latency_s": speed.latency_s, "measured_at": measured_at}
            known |= {"wire": speed.wire.value, "refused": list(speed.refused), **figures}
        empty = {"wire": None, "bytes_per_s": 0.0, "latency_s": 0.0, "refused": [], "measured_at": measured_at}
        key = {"job_id": fact.job_id, "target": fact.target, "source": fact.source}
        statement = insert(WireRow).values(key | empty | known)
        session.execute(statement.on_conflict_do_update(index_elements=list(key), set_=known))
    for job_id in sorted({fact.job_id for fact in facts}):
        session.execute(delete(WireRow).where(WireRow.job_id == job_id, WireRow.measured_at < now - KEPT))
