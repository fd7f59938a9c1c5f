"""REST of notices: list."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from agent.protocol.notice_life import NoticePhase, phase
from agent.protocol.sync import NoticeKind
from liver_core.layout.limits import NodeId
from service.context import PERSON_ONLY, ContextOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.notices.queries import as_fact, list_notices, open_notices
from service.notices.tables import NoticeRow
from service.paging import PagesOf

router = APIRouter(prefix="/api/v1/notices", tags=["notices"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class NoticeOut(BaseModel):
    """What an agent reported of a notice: that it was announced, has come nearer, or is withdrawn."""

    notice_id: int
    node_id: str
    kind: NoticeKind
    source: str
    deadline_at: datetime | None
    first_seen_at: datetime
    recorded_at: datetime
    raw: str
    withdrawn_at: datetime | None
    open: bool
    state: NoticePhase


@router.get("", operation_id="list_notices", summary="List notices, newest first")
def list_all(
    context: ContextOf,
    session: SessionOf,
    pages: PagesOf,
    node_id: Annotated[NodeId | None, Query(description="Only of this node.")] = None,
) -> list[NoticeOut]:
    """`open`: this is the newest fact of a notice, and the notice still counts. `state`: heard (jobs leave the node),
    due (its deadline has passed, the node gets no new rank), withdrawn, or over."""
    now = context.clock()
    rows = list_notices(session, pages, node_id=node_id)
    still_open = {row.notice_id for row in open_notices(session, now=now, node_ids={row.node_id for row in rows})}
    return [
        NoticeOut(
            notice_id=row.notice_id,
            node_id=row.node_id,
            kind=NoticeKind(row.kind),
            source=row.source,
            deadline_at=row.deadline_at,
            first_seen_at=row.first_seen_at,
            recorded_at=row.recorded_at,
            raw=row.raw,
            withdrawn_at=row.withdrawn_at,
            open=row.notice_id in still_open,
            state=_state(row, now, is_open=row.notice_id in still_open),
        )
        for row in rows
    ]


def _state(row: NoticeRow, now: datetime, *, is_open: bool) -> NoticePhase:
    """A fact that a newer one has replaced, or of a node that is gone, is over."""
    if is_open or row.withdrawn_at is not None:
        return phase(as_fact(row), now)
    return NoticePhase.OVER
