"""REST of notices: list, end."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from agent.protocol.notice_life import NoticePhase
from agent.protocol.sync import NoticeKind
from liver_core.layout.limits import COUNT_MAX, NodeId
from service.audit.operations import note
from service.context import PERSON_ONLY, ContextOf, OperatorOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.notices.operations import end_notice
from service.notices.queries import as_fact, list_occurrences, open_notices, rows_of_occurrences
from service.notices.rules import earliest_deadline, phase_of_all
from service.notices.tables import NoticeRow
from service.paging import PagesOf

router = APIRouter(prefix="/api/v1/notices", tags=["notices"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class ChannelOut(BaseModel):
    """What one channel said of it."""

    source: str = Field(description="The channel, such as aws-imds at the node or aws-queue at the service.")
    kind: NoticeKind
    heard_at: datetime
    lag_s: float = Field(description="Seconds after the first channel.")
    deadline_at: datetime | None = Field(description="As this channel says it; null if it says none.")
    withdrawn_at: datetime | None = Field(description="When this channel took it back.")
    raw: str


class NoticeOut(BaseModel):
    """One announcement that a node will go, or of advice, whoever said so. `kind`, `source` and `raw`: of the channel
    that was first."""

    notice_id: int
    node_id: str
    kind: NoticeKind
    source: str
    deadline_at: datetime | None = Field(description="The earliest that a channel names which has not taken it back.")
    first_seen_at: datetime
    recorded_at: datetime
    raw: str
    withdrawn_at: datetime | None = Field(description="When the last channel took it back; null while one says it.")
    open: bool
    state: NoticePhase
    channels: list[ChannelOut] = Field(description="Who said so, the first one first.")


@router.get("", operation_id="list_notices", summary="List notices, newest first")
def list_all(
    context: ContextOf,
    session: SessionOf,
    pages: PagesOf,
    node_id: Annotated[NodeId | None, Query(description="Only of this node.")] = None,
) -> list[NoticeOut]:
    """Each loss that was announced is one entry, with all channels that announced it. `open`: it still counts. `state`:
    heard (jobs leave the node), due (its deadline has passed, the node gets no new rank), withdrawn, or over."""
    now = context.clock()
    found = list_occurrences(session, pages, node_id=node_id)
    nodes = {row.node_id for _, rows in found for row in rows}
    still_open = {row.notice_id for row in open_notices(session, now=now, node_ids=nodes)}
    return [
        entry_of(number, rows, now, is_open=any(row.notice_id in still_open for row in rows)) for number, rows in found
    ]


@router.post("/{notice_id}/end", operation_id="end_notice", summary="Let a notice count no more")
def end(
    context: ContextOf, session: SessionOf, actor: OperatorOf, notice_id: Annotated[int, Path(ge=1, le=COUNT_MAX)]
) -> NoticeOut:
    """All its channels take it back, and jobs may use the node. A handoff that is open already goes on. What a channel
    announces anew is another notice, and counts."""
    now = context.clock()
    facts = end_notice(session, notice_id, now=now)
    sources = sorted({fact.source for fact in facts})
    note(session, actor, "end_notice", facts[0].node_id, now=now, notice_id=notice_id, sources=sources)
    ((number, rows),) = rows_of_occurrences(session, [notice_id])
    return entry_of(number, rows, now, is_open=False)


def entry_of(number: int, rows: Sequence[NoticeRow], now: datetime, *, is_open: bool) -> NoticeOut:
    """An occurrence as it is shown. `is_open`: a row of it still counts."""
    facts, first = [as_fact(row) for row in rows], rows[0]
    withdrawn = [fact.withdrawn_utc for fact in facts if fact.withdrawn_utc is not None]
    said = [fact for fact in facts if fact.withdrawn_utc is None] or facts
    # What was said of a node that is gone is over.
    counts = is_open or len(withdrawn) == len(facts)
    return NoticeOut(
        notice_id=number,
        node_id=first.node_id,
        kind=NoticeKind(first.kind),
        source=first.source,
        deadline_at=earliest_deadline(said),
        first_seen_at=first.first_seen_at,
        recorded_at=min(row.recorded_at for row in rows),
        raw=first.raw,
        withdrawn_at=max(withdrawn) if len(withdrawn) == len(facts) else None,
        open=is_open,
        state=phase_of_all(facts, now) if counts else NoticePhase.OVER,
        channels=[
            ChannelOut(
                source=row.source,
                kind=NoticeKind(row.kind),
                heard_at=row.first_seen_at,
                lag_s=(row.first_seen_at - first.first_seen_at).total_seconds(),
                deadline_at=row.deadline_at,
                withdrawn_at=row.withdrawn_at,
                raw=row.raw,
            )
            for row in rows
        ],
    )
