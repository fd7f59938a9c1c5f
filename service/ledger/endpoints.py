"""REST of the ledger: goodput and dollars by cause."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.values import Utc
from liver_core.layout.limits import JobId
from service.context import PERSON_ONLY, SessionOf
from service.edge.routes import PeoplesRoute
from service.jobs.tables import JobRow
from service.ledger.queries import CauseSum, goodput, summary
from service.ledger.tables import Cause, IntervalRow
from service.problems import not_found

router = APIRouter(prefix="/api/v1/ledger", tags=["ledger"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class CauseOut(BaseModel):
    """What one cause took."""

    cause: Cause
    slot_seconds: float
    share: float
    dollars: float


class LedgerOut(BaseModel):
    """Where the time and the money went."""

    job_id: str | None
    slot_seconds: float
    dollars: float
    goodput: float | None = Field(description="Productive share of the slot time; null before there is any.")
    causes: list[CauseOut]

    @classmethod
    def of(cls, job_id: str | None, sums: list[CauseSum]) -> "LedgerOut":
        """From the sums by cause."""
        total = sum(item.slot_seconds for item in sums)
        return cls(
            job_id=job_id,
            slot_seconds=total,
            dollars=sum(item.dollars for item in sums),
            goodput=goodput(sums),
            causes=[
                CauseOut(
                    cause=item.cause,
                    slot_seconds=item.slot_seconds,
                    share=item.slot_seconds / total if total else 0.0,
                    dollars=item.dollars,
                )
                for item in sums
            ],
        )


@router.get("", operation_id="show_ledger", summary="Goodput and dollars by cause")
def show(
    session: SessionOf,
    job_id: Annotated[JobId | None, Query()] = None,
    since: Annotated[Utc | None, Query()] = None,
    until: Annotated[Utc | None, Query()] = None,
) -> LedgerOut:
    """Of one job, or of all leased slots (then idle time is included)."""
    _check_known(session, job_id)
    return LedgerOut.of(job_id, list(summary(session, job_id=job_id, since=since, until=until)))


def _check_known(session: Session, job_id: str | None) -> None:
    if job_id is None or session.get(JobRow, job_id) is not None:
        return
    # What a deleted job took stays in the ledger.
    if session.scalars(select(IntervalRow.interval_id).where(IntervalRow.job_id == job_id).limit(1)).first() is None:
        raise not_found("job", job_id)
