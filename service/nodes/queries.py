"""Reads of nodes."""

from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.nodes.tables import NodeRow

LIST_MAX = 10_000


def list_nodes(session: Session, *, limit: int = 1_000) -> Sequence[NodeRow]:
    """By name."""
    return session.scalars(select(NodeRow).order_by(NodeRow.node_id).limit(min(limit, LIST_MAX))).all()


def nodes_by_id(session: Session, node_ids: Iterable[str]) -> dict[str, NodeRow]:
    """Those of the named nodes that are known."""
    rows = session.scalars(select(NodeRow).where(NodeRow.node_id.in_(list(node_ids))))
    return {row.node_id: row for row in rows}
