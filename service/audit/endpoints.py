"""REST of the audit log."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy import select

from liver_core.layout.limits import ShortText
from service.audit.tables import AuditRow
from service.context import PERSON_ONLY, SessionOf

router = APIRouter(prefix="/api/v1/audit", tags=["audit"], dependencies=[PERSON_ONLY])


class AuditOut(BaseModel):
    """One change that somebody asked for."""

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
    target: Annotated[ShortText | None, Query(description="Only of this job, node, pool or token.")] = None,
    before: Annotated[int | None, Query(ge=1, le=2**63 - 1, description="Only rows with a smaller audit_id.")] = None,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
) -> list[AuditOut]:
    """For the next page, give the last `audit_id` as `before`."""
    statement = select(AuditRow)
    if target is not None:
        statement = statement.where(AuditRow.target == target)
    if before is not None:
        statement = statement.where(AuditRow.audit_id < before)
    found = session.scalars(statement.order_by(AuditRow.audit_id.desc()).limit(limit))
    return [AuditOut.model_validate(row, from_attributes=True) for row in found]
