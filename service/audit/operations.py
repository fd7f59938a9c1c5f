"""Writes the audit log, in the transaction of the change that a row is about: neither is stored without the other."""

from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from service.audit.tables import AuditRow
from service.tokens.operations import Caller


def note(session: Session, caller: Caller, action: str, target: str, *, now: datetime, **detail: Any) -> None:
    """`caller` did `action`, named as in the API description, to `target`. `detail`: JSON, and never a secret."""
    session.add(
        AuditRow(
            at=now,
            actor=caller.name,
            token_id=caller.token_id,
            role=caller.role,
            action=action,
            target=target,
            detail=detail,
        )
    )
