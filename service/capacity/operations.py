"""Knows the machine of each node. Nothing here orders one."""

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from service.capacity.tables import InstanceRow, RequestRow

STARTED_BY_HAND = "whoever started the agent"


def machine_of(session: Session, *, node_id: str, provider: str, pool: str, now: datetime) -> InstanceRow:
    """The machine of a node whose agent reports. One that nobody ordered here was started by hand: it is stored with
    the request that a person made somewhere else."""
    present = (InstanceRow.node_id == node_id) & InstanceRow.released_at.is_(None)
    instance = session.scalars(select(InstanceRow).where(present)).one_or_none()
    if instance is None:
        request = RequestRow(
            provider=provider, pool=pool, machines=1, asked_by=STARTED_BY_HAND, asked_at=now, ended_at=now,
            end_reason="the machine has come",
        )  # fmt: skip
        session.add(request)
        session.flush()
        instance = InstanceRow(
            request_id=request.request_id, provider=provider, node_id=node_id, pool=pool, known_since=now
        )
        session.add(instance)
        session.flush()
    return instance


def release_machine(session: Session, node_id: str, *, now: datetime) -> None:
    """Another machine has this node's name from now on."""
    session.execute(
        update(InstanceRow)
        .where(InstanceRow.node_id == node_id, InstanceRow.released_at.is_(None))
        .values(released_at=now)
        .execution_options(synchronize_session=False)
    )
