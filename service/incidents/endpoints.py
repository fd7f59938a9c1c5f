"""REST of incidents: list, show, and the phases of one handoff in time."""

from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Query
from sqlalchemy import select
from sqlalchemy.orm import Session

from liver_core.layout.limits import COUNT_MAX, JobId, NodeId
from service.context import PERSON_ONLY, ContextOf, SessionOf
from service.decisions.endpoints import DecisionOut
from service.decisions.tables import DecisionRow
from service.edge.routes import PeoplesRoute
from service.handoffs.schemas import HandoffOut
from service.handoffs.tables import HandoffRow
from service.incidents.queries import EXAMINED_MAX, Incident, IncidentFilter, incidents_of, list_incidents
from service.incidents.rules import TAIL_S, picture
from service.incidents.schemas import (
    IncidentCosts,
    IncidentHandoff,
    IncidentOut,
    IncidentSummary,
    WaterfallOut,
)
from service.jobs.schemas import GenerationOut
from service.jobs.tables import GenerationRow
from service.leases.endpoints import LeaseOut
from service.notices.endpoints import entry_of
from service.notices.queries import notices_behind, rows_of_occurrences
from service.paging import PagesOf
from service.problems import not_found

router = APIRouter(prefix="/api/v1/incidents", tags=["incidents"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
of_handoffs = APIRouter(
    prefix="/api/v1/handoffs", tags=["handoffs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY]
)
DECISIONS_MAX = 50


@router.get("", operation_id="list_incidents", summary="List incidents, newest first")
def list_all(
    context: ContextOf,
    session: SessionOf,
    pages: PagesOf,
    node_id: Annotated[NodeId | None, Query(description="Only of this node.")] = None,
    job_id: Annotated[JobId | None, Query(description="Only of nodes that worked for this job.")] = None,
    is_open: Annotated[
        bool | None, Query(alias="open", description="Only those that still count, or only those that do not.")
    ] = None,
    failed: Annotated[
        bool | None,
        Query(
            description="Only those whose outcome is failed or restarted, or only the others. "
            f"A page looks through {EXAMINED_MAX:,} notices at most; it may be short although another follows."
        ),
    ] = None,
) -> list[IncidentSummary]:
    """Each notice with what became of it: its outcome, pause, lost steps and dollars."""
    now = context.clock()
    wanted = IncidentFilter(node_id=node_id, job_id=job_id, open=is_open, failed=failed)
    return [_summary(item, now) for item in list_incidents(session, pages, wanted, now=now)]


@router.get("/{incident_id}", operation_id="show_incident", summary="Show one incident")
def show(context: ContextOf, session: SessionOf, incident_id: Annotated[int, Path(ge=1, le=COUNT_MAX)]) -> IncidentOut:
    """A notice with what each channel said, what was decided, the handoffs and restarts that followed, and the cost."""
    now = context.clock()
    found = incidents_of(session, rows_of_occurrences(session, [incident_id]), now=now)
    if not found:
        raise not_found("incident", incident_id)
    [item] = found
    summary = _summary(item, now)
    seen = summary.first_seen_at
    until = max(seen, summary.deadline_at or seen) + timedelta(seconds=TAIL_S)
    return IncidentOut(
        **summary.model_dump(),
        lease=LeaseOut.of(item.lease),
        channels=entry_of(item.number, item.rows, now, is_open=item.is_open).channels,
        decisions=_decisions(session, item.jobs, min(row.recorded_at for row in item.rows), until),
        handoffs=[
            IncidentHandoff(handoff=HandoffOut.of(row), waterfall=_waterfall(row, item.number, seen))
            for row in item.handoffs
        ],
        restarts=[
            GenerationOut.of(session.get_one(GenerationRow, (again.job_id, again.generation)))
            for again in item.restarts
        ],
        costs=IncidentCosts.model_validate(item.costs, from_attributes=True),
    )


@of_handoffs.get("/{handoff_id}/waterfall", operation_id="show_waterfall", summary="Phases of a handoff in time")
def waterfall(session: SessionOf, handoff_id: str) -> WaterfallOut:
    """From the notice that it answers, or else from its opening. Of what all ranks do at once, the slowest rank's."""
    try:
        row = session.get(HandoffRow, UUID(handoff_id))
    except ValueError:
        row = None
    if row is None:
        raise not_found("handoff", handoff_id)
    number, seen = notices_behind(session, [row]).get(row.handoff_id, (None, None))
    return _waterfall(row, number, seen)


def _waterfall(row: HandoffRow, number: int | None, noticed_at: datetime | None) -> WaterfallOut:
    measures = row.measures or {}
    found = picture(
        measures.get("phases_s") or {},
        opened_at=row.opened_at,
        noticed_at=noticed_at,
        pause_s=measures.get("pause_s"),
    )
    return WaterfallOut.of(UUID(str(row.handoff_id)), number, found)


def _summary(item: Incident, now: datetime) -> IncidentSummary:
    entry = entry_of(item.number, item.rows, now, is_open=item.is_open)
    handoffs = [HandoffOut.of(row) for row in item.handoffs]
    pauses = [row.pause_s for row in handoffs if row.pause_s is not None]
    moved = [row.bytes_moved for row in handoffs if row.bytes_moved is not None]
    safe = [row.notice_to_safe_s for row in handoffs if row.notice_to_safe_s is not None]
    return IncidentSummary(
        incident_id=item.number,
        node_id=entry.node_id,
        pool=item.lease.pool,
        kind=entry.kind,
        source=entry.source,
        drained=item.drained,
        first_seen_at=entry.first_seen_at,
        deadline_at=entry.deadline_at,
        withdrawn_at=entry.withdrawn_at,
        open=entry.open,
        state=entry.state,
        jobs=list(item.jobs),
        handoff_ids=[row.handoff_id for row in handoffs],
        outcome=item.outcome,
        outcome_reason=item.reason,
        pause_s=sum(pauses) if pauses else None,
        lost_steps=sum(again.lost_steps for again in item.restarts),
        dollars=item.costs.total,
        bytes_moved=sum(moved) if moved else None,
        notice_to_safe_s=max(safe, default=None),
    )


def _decisions(session: Session, jobs: tuple[str, ...], since: datetime, until: datetime) -> list[DecisionOut]:
    rows = session.scalars(
        select(DecisionRow)
        .where(DecisionRow.job_id.in_(jobs), DecisionRow.decided_at >= since, DecisionRow.decided_at < until)
        .order_by(DecisionRow.decision_id)
        .limit(DECISIONS_MAX)
    )
    return [DecisionOut.model_validate(row, from_attributes=True) for row in rows]
