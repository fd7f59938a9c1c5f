"""Reads of nodes."""

from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.nodes.tables import NodeRow, NodeState
from service.paging import Pages


def list_nodes(
    session: Session, pages: Pages, *, states: Collection[NodeState] = (), pool: str | None = None
) -> Sequence[NodeRow]:
    """By name. `states`: any, if empty."""
    statement = select(NodeRow)
    if states:
        statement = statement.where(NodeRow.state.in_(states))
    if pool is not None:
        statement = statement.where(NodeRow.pool == pool)
    return pages.oldest(session, statement, NodeRow.node_id)
