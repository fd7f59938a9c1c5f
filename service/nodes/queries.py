"""Reads of nodes."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.nodes.tables import NodeRow

LIST_MAX = 10_000


def list_nodes(session: Session, *, limit: int = 1_000) -> Sequence[NodeRow]:
    """By name."""
    return session.scalars(select(NodeRow).order_by(NodeRow.node_id).limit(min(limit, LIST_MAX))).all()
