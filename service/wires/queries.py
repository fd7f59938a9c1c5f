"""Reads the wires of a job's world."""

from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.wires import WireKind
from service.wires.estimate import MoveEstimate, move_estimate
from service.wires.tables import WireRow


def wires_between(session: Session, job_id: str, nodes: Collection[str]) -> Sequence[WireRow]:
    """As last measured, in order of who reads."""
    between = WireRow.job_id == job_id, WireRow.source.in_(nodes), WireRow.target.in_(nodes)
    return session.scalars(select(WireRow).where(*between).order_by(WireRow.target, WireRow.source)).all()


def move_over(rows: Collection[WireRow], state_bytes: float, nodes: int) -> MoveEstimate:
    """What a move of all of a job's state takes over them."""
    measured = [(WireKind(row.wire), row.bytes_per_s) for row in rows if row.wire is not None]
    return move_estimate(state_bytes, nodes, measured)
