"""REST of the audit log."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy import select

from liver_core.layout.limits import ShortText
from service.audit.tables import AuditRow
from service.context import PERSON_ONLY, SessionOf
from service.edge.routes import PeoplesRoute
from service.paging import PagesOf

router = APIRouter(prefix="/api/v1/audit", tags=["audit"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class AuditOut(BaseModel):
    """One change that somebody asked for, or that the service made by itself: then `role` is `service`."""

    audit_id: int
    at: datetime
    actor: str
    token_id: str
    role: str
    action: str
    target: str
    detail: dict[str, Any]


@router.get("", operation_id="list_audit", summary="Who changed what, newest first")
def list_all(
    session: SessionOf,
    pages: PagesOf,
    target: Annotated[ShortText | None, Query(description="Only of this job, node, pool or token.")] = None,
) -> list[AuditOut]:
    """Rows are only ever added."""
    statement = select(AuditRow)
    if target is not None:
        statement = statement.where(AuditRow.target == target)
    found = pages.newest(session, statement, AuditRow.audit_id)
    return [AuditOut.model_validate(row, from_attributes=True) for row in found]
