"""REST of handoffs: list, show."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from agent.protocol.values import HandoffState
from liver_core.layout.limits import JobId, Text
from service.context import PERSON_ONLY, SessionOf
from service.edge.routes import PeoplesRoute
from service.handoffs.queries import list_handoffs
from service.handoffs.schemas import HandoffOut
from service.handoffs.tables import HandoffRow
from service.paging import PagesOf
from service.problems import not_found

router = APIRouter(prefix="/api/v1/handoffs", tags=["handoffs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


@router.get("", operation_id="list_handoffs", summary="List handoffs, newest first")
def list_all(
    session: SessionOf,
    pages: PagesOf,
    job_id: Annotated[JobId | None, Query(description="Only of this job.")] = None,
    match: Annotated[Text | None, Query(max_length=64, description="Only those whose id begins so.")] = None,
    state: Annotated[
        list[HandoffState] | None,
        Query(max_length=len(HandoffState), description="Only in this state; may be given several times."),
    ] = None,
) -> list[HandoffOut]:
    """Also those that were aborted, with the reason, and those that agents made while this service was away."""
    found = list_handoffs(session, pages, job_id=job_id, match=match, states=state or ())
    return [HandoffOut.of(row) for row in found]


@router.get("/{handoff_id}", operation_id="show_handoff", summary="Show one handoff")
def show(session: SessionOf, handoff_id: str) -> HandoffOut:
    """With its phases and everything that was measured."""
    try:
        row = session.get(HandoffRow, UUID(handoff_id))
    except ValueError:
        row = None
    if row is None:
        raise not_found("handoff", handoff_id)
    return HandoffOut.of(row)
