"""REST of notices: list."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from agent.protocol.sync import NoticeKind
from service.context import PERSON_ONLY, ContextOf, SessionOf
from service.notices.queries import open_notices, recent_notices

router = APIRouter(prefix="/api/v1/notices", tags=["notices"], dependencies=[PERSON_ONLY])


class NoticeOut(BaseModel):
    """One announcement, as an agent reported it."""

    notice_id: int
    node_id: str
    kind: NoticeKind
    source: str
    deadline_at: datetime | None
    first_seen_at: datetime
    recorded_at: datetime
    raw: str
    open: bool


@router.get("", operation_id="list_notices", summary="List notices, newest first")
def list_all(
    context: ContextOf, session: SessionOf, limit: Annotated[int, Query(ge=1, le=1_000)] = 100
) -> list[NoticeOut]:
    """`open`: the notice still applies to a node that is there."""
    still_open = {row.notice_id for row in open_notices(session, now=context.clock())}
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
            open=row.notice_id in still_open,
        )
        for row in recent_notices(session, limit=limit)
    ]
