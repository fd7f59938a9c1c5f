"""Writes the audit log, in the transaction of the change that a row is about: neither is stored without the other."""

from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from service.audit.tables import AuditRow
from service.tokens.operations import Caller

OWN = "service"
"""For actor and role, where no token is behind a change."""


def note(session: Session, caller: Caller, action: str, target: str, *, now: datetime, **detail: Any) -> None:
    """`caller` did `action`, named as in the API description, to `target`. `detail`: JSON, and never a secret. Why, as
    the caller says, stands there too."""
    if caller.why:
        detail["why"] = caller.why
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


def note_own(session: Session, action: str, target: str, *, now: datetime, **detail: Any) -> None:
    """The same of what the service did by itself."""
    session.add(AuditRow(at=now, actor=OWN, token_id="", role=OWN, action=action, target=target, detail=detail))
