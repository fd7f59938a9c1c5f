"""Writes what handoffs moved over the network, for the ledger."""

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.sync import HandoffMirror
from service.handoffs.tables import HandoffRow
from service.ledger.tables import EgressRow
from service.nodes.tables import NodeRow


def note_egress(session: Session, row: HandoffRow, mirror: HandoffMirror) -> None:
    """Store the bytes that the ranks measured, once they are known. A later report replaces an earlier one."""
    moved = mirror.measures.bytes_moved
    if moved is None or mirror.source is None:
        return
    pools = set(session.scalars(select(NodeRow.pool).where(NodeRow.node_id.in_(mirror.source.node_ids()))))
    values = {
        "handoff_id": row.handoff_id,
        "job_id": row.job_id,
        "pool": pools.pop() if len(pools) == 1 else None,
        "bytes": moved,
        "at": row.changed_at,
    }
    statement = insert(EgressRow).values(values)
    # Of which pool the nodes were when it moved does not change when a node changes its pool.
    session.execute(statement.on_conflict_do_update(index_elements=["handoff_id"], set_={"bytes": moved}))
