"""REST of the ledger: goodput and dollars by cause, what left pools, and what restarts would have cost."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.errors import FieldProblem
from agent.protocol.values import Utc
from liver_core.layout.limits import JobId
from service.context import PERSON_ONLY, SessionOf
from service.edge.routes import PeoplesRoute
from service.jobs.queries import list_generations, list_jobs
from service.jobs.tables import JobRow, JobState
from service.ledger.queries import (
    CauseSum,
    Egress,
    by_generation,
    egress,
    goodput,
    interruptions_usd,
    saved_usd,
    summary,
)
from service.ledger.restarts import Restarts, observed, restarts_instead
from service.ledger.sums import Unsplittable
from service.ledger.tables import Cause, IntervalRow, SumRow
from service.paging import Pages, PagesOf, paged
from service.problems import invalid, not_found

router = APIRouter(prefix="/api/v1/ledger", tags=["ledger"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class CauseOut(BaseModel):
    """What one cause took."""

    cause: Cause
    slot_seconds: float
    share: float
    dollars: float

    @classmethod
    def all_of(cls, sums: list[CauseSum]) -> list["CauseOut"]:
        """From the sums by cause."""
        total = sum(item.slot_seconds for item in sums)
        return [
            cls(
                cause=item.cause,
                slot_seconds=item.slot_seconds,
                share=item.slot_seconds / total if total else 0.0,
                dollars=item.dollars,
            )
            for item in sums
        ]


class EgressOut(BaseModel):
    """What handoffs moved over the network."""

    bytes: int
    dollars: float | None = Field(description="Null while the price of some of it is not known.")

    @classmethod
    def of(cls, found: Egress) -> "EgressOut":
        """From the sum."""
        return cls(bytes=found.bytes, dollars=found.dollars)


class LedgerOut(BaseModel):
    """Where the time and the money went."""

    job_id: str | None
    slot_seconds: float
    dollars: float = Field(description="Of the slots, each moment at its price. Without what left pools.")
    unpriced_slot_seconds: float = Field(description="For which no price is known: they count as costing nothing.")
    goodput: float | None = Field(description="Productive share of the slot time; null before there is any.")
    causes: list[CauseOut]
    egress: EgressOut
    interruptions_dollars: float = Field(
        description="Of pause, recompute, lost and fallback_restart, and of what left pools as far as that has a price."
    )
    saved_dollars: float | None = Field(
        description="What the same slots would have cost more on demand; null while no pool has such a price."
    )
    saved_unknown_slot_seconds: float = Field(description="Slot time that saved_dollars leaves out.")

    @classmethod
    def of(cls, job_id: str | None, sums: list[CauseSum], moved: Egress) -> "LedgerOut":
        """From the sums by cause, and what left pools."""
        return cls(
            job_id=job_id,
            slot_seconds=sum(item.slot_seconds for item in sums),
            dollars=sum(item.dollars for item in sums),
            unpriced_slot_seconds=sum(item.unpriced for item in sums),
            goodput=goodput(sums),
            causes=CauseOut.all_of(sums),
            egress=EgressOut.of(moved),
            interruptions_dollars=interruptions_usd(sums, moved),
            saved_dollars=saved_usd(sums),
            saved_unknown_slot_seconds=sum(item.uncompared for item in sums),
        )


class LedgerJobOut(LedgerOut):
    """Where the time and the money of one job went."""

    name: str
    state: JobState


class LedgerGenerationOut(BaseModel):
    """What one generation of a job took."""

    generation: int
    ranks: int
    causes: list[CauseOut]


class RestartsOut(BaseModel):
    """An estimate: what it would have cost to restart the job from a checkpoint wherever it was handed over live."""

    job_id: str
    estimate: str = Field(description="What the estimate rests on, and what it leaves out.")
    handoffs: int = Field(description="Moves that did happen, each without a restart.")
    handoffs_slot_seconds: float = Field(description="The pauses of those moves, as the ledger has them.")
    save_s: float | None = Field(description="Median of this job's own checkpoints; null until one was written.")
    start_s: float | None = Field(description="Median from a start of this job to its first step; null until one was.")
    slot_seconds: float | None = Field(description="Of a save and a start for each move; null until both were seen.")
    dollars: float | None = Field(description="At what the job paid for a slot in the mean; null like slot_seconds.")

    @classmethod
    def of(cls, job_id: str, found: Restarts) -> "RestartsOut":
        """From the estimate."""
        return cls.model_validate({"job_id": job_id} | {name: getattr(found, name) for name in Restarts.__slots__})


@router.get("", operation_id="show_ledger", summary="Goodput and dollars by cause")
def show(
    session: SessionOf,
    job_id: Annotated[JobId | None, Query()] = None,
    since: Annotated[Utc | None, Query()] = None,
    until: Annotated[Utc | None, Query()] = None,
) -> LedgerOut:
    """Of one job, or of all leased slots (then idle time is included). Of times for which intervals are kept no more,
    `since` and `until` must be full hours."""
    _check_known(session, job_id)
    return _ledger_of(session, job_id, since, until)


def _ledger_of(session: Session, job_id: str | None, since: datetime | None, until: datetime | None) -> LedgerOut:
    which = {"job_id": job_id, "since": since, "until": until}
    try:
        sums = list(summary(session, **which))
    except Unsplittable as error:
        raise invalid(FieldProblem(field="since" if error.time == since else "until", rule=str(error))) from None
    return LedgerOut.of(job_id, sums, egress(session, **which))


@router.get("/jobs", operation_id="list_ledger_jobs", summary="Goodput and dollars by job")
def jobs(
    session: SessionOf,
    pages: Annotated[Pages, paged(usual=20, most=50)],
    since: Annotated[Utc | None, Query()] = None,
    until: Annotated[Utc | None, Query()] = None,
) -> list[LedgerJobOut]:
    """Jobs that there are, newest first. `since` and `until` as of the whole ledger."""
    found = []
    for row in list_jobs(session, pages):
        one = _ledger_of(session, row.job_id, since, until)
        found.append(LedgerJobOut(**one.model_dump(), name=row.name, state=JobState(row.state)))
    return found


@router.get("/generations", operation_id="list_ledger_generations", summary="Goodput and dollars by generation")
def generations(session: SessionOf, pages: PagesOf, job_id: Annotated[JobId, Query()]) -> list[LedgerGenerationOut]:
    """Of one job, newest first. Time in which a slot worked for the job in no generation is left out."""
    _check_exists(session, job_id)
    rows = list_generations(session, pages, job_id)
    sums = by_generation(session, job_id, [row.generation for row in rows])
    return [
        LedgerGenerationOut(
            generation=row.generation,
            ranks=len(row.roster["members"]),
            causes=CauseOut.all_of(sums[row.generation]),
        )
        for row in rows
    ]


@router.get("/restarts", operation_id="show_restarts_instead", summary="What restarts would have cost")
def restarts(session: SessionOf, job_id: Annotated[JobId, Query()]) -> RestartsOut:
    """An estimate from the starts and checkpoints of the job itself."""
    _check_exists(session, job_id)
    return RestartsOut.of(job_id, restarts_instead(observed(session, job_id), list(summary(session, job_id=job_id))))


def _check_exists(session: Session, job_id: str) -> None:
    if session.get(JobRow, job_id) is None:
        raise not_found("job", job_id)


def _check_known(session: Session, job_id: str | None) -> None:
    if job_id is None or session.get(JobRow, job_id) is not None:
        return
    # What a deleted job took stays in the ledger.
    sums = select(SumRow.sum_id).where(SumRow.job_id == job_id)
    fresh = select(IntervalRow.interval_id).where(IntervalRow.job_id == job_id, ~IntervalRow.rolled)
    if all(session.scalars(known.limit(1)).first() is None for known in (fresh, sums)):
        raise not_found("job", job_id)
