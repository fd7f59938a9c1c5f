"""Reads of machines."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.capacity.tables import InstanceRow, RequestRow
from service.paging import Pages


def list_instances(
    session: Session, pages: Pages, *, node_id: str | None = None
) -> Sequence[tuple[InstanceRow, RequestRow | None]]:
    """All or those of a node, newest first, each with the request that it came from, as long as that is kept."""
    statement = select(InstanceRow)
    if node_id is not None:
        statement = statement.where(InstanceRow.node_id == node_id)
    rows = pages.newest(session, statement, InstanceRow.instance_id)
    wanted = select(RequestRow).where(RequestRow.request_id.in_({row.request_id for row in rows if row.request_id}))
    requests = {row.request_id: row for row in session.scalars(wanted)}
    return [(row, requests[row.request_id] if row.request_id else None) for row in rows]
