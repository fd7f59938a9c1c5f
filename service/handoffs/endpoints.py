"""REST of handoffs: list, show."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query

from liver_core.layout.limits import JobId, Text
from service.context import PERSON_ONLY, SessionOf
from service.handoffs.queries import list_handoffs
from service.handoffs.schemas import HandoffOut
from service.handoffs.tables import HandoffRow
from service.problems import not_found

router = APIRouter(prefix="/api/v1/handoffs", tags=["handoffs"], dependencies=[PERSON_ONLY])


@router.get("", operation_id="list_handoffs", summary="List handoffs, newest first")
def list_all(
    session: SessionOf,
    job_id: Annotated[JobId | None, Query()] = None,
    match: Annotated[Text | None, Query(max_length=64, description="Only those whose id begins so.")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
) -> list[HandoffOut]:
    """Also those that were aborted, with the reason, and those that agents made while this service was away."""
    return [HandoffOut.of(row) for row in list_handoffs(session, job_id=job_id, match=match, limit=limit)]


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
