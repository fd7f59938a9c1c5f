"""Reads the wires of a job's world."""

from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.wires import WireKind
from service.wires.estimate import MoveEstimate, move_estimate
from service.wires.tables import WireRow


def wires_between(session: Session, job_id: str, nodes: Collection[str]) -> Sequence[WireRow]:
    """As last measured, in order of who reads: of each node the newest, since it reads one other at a time."""
    between = WireRow.job_id == job_id, WireRow.source.in_(nodes), WireRow.target.in_(nodes)
    rows = session.scalars(select(WireRow).where(*between).order_by(WireRow.measured_at, WireRow.source))
    newest = {row.target: row for row in rows}
    return [newest[target] for target in sorted(newest)]


def move_over(rows: Collection[WireRow], state_bytes: float, nodes: int) -> MoveEstimate:
    """What a move of all of a job's state takes over them."""
    measured = [(None if row.wire is None else WireKind(row.wire), row.bytes_per_s) for row in rows]
    return move_estimate(state_bytes, nodes, measured)
