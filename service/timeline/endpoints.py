"""REST of a job's course: what the one chart of its page shows."""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from agent.protocol.errors import FieldProblem
from agent.protocol.values import Utc
from liver_core.layout.limits import JobId
from service.context import PERSON_ONLY, ContextOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.handoffs.schemas import HandoffOut
from service.jobs.tables import JobRow, SourceKind
from service.ledger.tables import Cause
from service.notices.queries import notices_behind
from service.problems import invalid, not_found
from service.timeline.queries import Mark, Spending, buckets_of, marks_of, points_of, span_of

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
POINTS_MAX = 2_000


class PointOut(BaseModel):
    """One step that stands for some before it."""

    at: datetime
    step: int
    generation: int
    seconds: float
    loss: float | None
    tokens_per_s: float | None = Field(description="In the mean of the steps that it stands for.")
    steps: int = Field(description="How many it stands for.")
    dollars: float = Field(description="Of the job from `since` up to then.")


class BucketOut(BaseModel):
    """What the job's slots did in a part of the span."""

    starts_at: datetime
    ends_at: datetime
    slot_seconds: dict[Cause, float]
    dollars: dict[Cause, float]
    dollars_until: float = Field(description="Of the job from `since` to the end of this part.")


class MarkOut(BaseModel):
    """Something that happened to the job."""

    kind: Literal["handoff", "start", "restart"]
    at: datetime
    dollars: float = Field(description="Of the job from `since` up to then.")
    generation: int | None
    step: int | None = Field(description="At which it happened; null if not known.")
    handoff_id: UUID | None
    incident_id: int | None = Field(description="The notice behind it.")
    cause: str
    state: str
    source_layout: str | None
    target_layout: str
    pause_s: float | None
    lost_steps: int
    reason: str


class TimelineOut(BaseModel):
    """The course of a job."""

    job_id: str
    since: datetime
    until: datetime
    points: list[PointOut]
    buckets: list[BucketOut]
    marks: list[MarkOut]
    thinned: bool = Field(description="Some points stand for several steps.")


@router.get("/{job_id}/timeline", operation_id="show_timeline", summary="The course of a job")
def show(
    context: ContextOf,
    session: SessionOf,
    job_id: JobId,
    since: Annotated[Utc | None, Query(description="The job's begin, if absent.")] = None,
    until: Annotated[Utc | None, Query(description="Now, or the job's end, if absent.")] = None,
    points: Annotated[int, Query(ge=1, le=POINTS_MAX, description="So many steps at most.")] = 400,
) -> TimelineOut:
    """Loss and pace by step, dollars and slot time by cause, handoffs and starts, over one span of time. A span of more
    than six hours is told by the hour. Steps are kept for a while, sums for ever."""
    row = session.get(JobRow, job_id)
    if row is None:
        raise not_found("job", job_id)
    if since is not None and until is not None and since >= until:
        raise invalid(FieldProblem(field="until", rule="must be after since"))
    first, last = span_of(row, since, until, context.clock())
    buckets = buckets_of(session, job_id, first, last)
    spent = _Spent(buckets)
    marks = marks_of(session, job_id, first, last)
    behind = notices_behind(session, [mark.handoff for mark in marks if mark.handoff is not None])
    found = points_of(session, job_id, first, last, points)
    return TimelineOut(
        job_id=job_id,
        since=first,
        until=last,
        points=[
            PointOut(
                at=point.at,
                step=point.step,
                generation=point.generation,
                seconds=point.seconds,
                loss=point.loss,
                tokens_per_s=None if point.tokens_per_s is None else float(point.tokens_per_s),
                steps=point.steps,
                dollars=spent.until(point.at),
            )
            for point in found
        ],
        buckets=[
            BucketOut(
                starts_at=bucket.starts_at,
                ends_at=bucket.ends_at,
                slot_seconds={Cause(cause): value for cause, value in bucket.slot_seconds.items()},
                dollars={Cause(cause): value for cause, value in bucket.dollars.items()},
                dollars_until=spent.until(bucket.ends_at),
            )
            for bucket in buckets
        ],
        marks=[_mark(mark, spent.until(mark.at), behind) for mark in marks],
        thinned=any(point.steps > 1 for point in found),
    )


class _Spent:
    """Dollars up to a moment: within a bucket they grow evenly."""

    def __init__(self, buckets: Sequence[Spending]) -> None:
        self._buckets = buckets
        self._begins = [bucket.starts_at for bucket in buckets]
        self._before, total = [], 0.0
        for bucket in buckets:
            self._before.append(total)
            total += sum(bucket.dollars.values())

    def until(self, at: datetime) -> float:
        place = bisect_right(self._begins, at) - 1
        if place < 0:
            return 0.0
        bucket = self._buckets[place]
        share = (at - bucket.starts_at) / (bucket.ends_at - bucket.starts_at)
        return self._before[place] + min(1.0, share) * sum(bucket.dollars.values())


def _mark(mark: Mark, dollars: float, behind: dict[UUID, tuple[int, datetime]]) -> MarkOut:
    if mark.handoff is not None:
        handoff = HandoffOut.of(mark.handoff)
        return MarkOut(
            kind="handoff",
            at=mark.at,
            dollars=dollars,
            generation=handoff.generation,
            step=handoff.cutover_step,
            handoff_id=handoff.handoff_id,
            incident_id=behind[handoff.handoff_id][0] if handoff.handoff_id in behind else None,
            cause=handoff.cause,
            state=handoff.state,
            source_layout=handoff.source_layout or None,
            target_layout=handoff.target_layout,
            pause_s=handoff.pause_s,
            lost_steps=0,
            reason=handoff.reason,
        )
    start = mark.start
    assert start is not None, "a mark is a handoff or a start"
    return MarkOut(
        kind="start" if start.source_kind == SourceKind.INIT and start.lost_steps == 0 else "restart",
        at=mark.at,
        dollars=dollars,
        generation=start.generation,
        step=start.checkpoint_step,
        handoff_id=None,
        incident_id=None,
        cause=start.source_kind,
        state="active" if start.first_step_at is not None else "starting",
        source_layout=None,
        target_layout=start.layout,
        pause_s=None,
        lost_steps=start.lost_steps,
        reason=start.reason,
    )
