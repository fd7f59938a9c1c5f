"""REST of jobs: submit, list, show, stop, checkpoint, resume, steps, logs, watch."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy.orm import Session

from agent.protocol.jobfile import JobFile
from agent.protocol.jobfile_check import JobFileError, check_job_file
from liver_core.layout.limits import COUNT_MAX, RANKS_MAX, JobId, Text
from service.audit.operations import note
from service.context import PERSON_ONLY, Context, ContextOf, OperatorOf, SessionOf
from service.db.wake import job_topic
from service.edge.routes import PeoplesRoute
from service.edge.rows import answer_with
from service.edge.tags import PreconditionOf, version_of
from service.handoffs.queries import list_handoffs, open_handoff
from service.handoffs.schemas import HandoffOut
from service.incidents.queries import list_job_incidents
from service.jobs import queries
from service.jobs.changes import JobChange, change_job, check_change
from service.jobs.checkpoints import checkpoint_of_step, list_checkpoints, newest_checkpoint
from service.jobs.deletion import parts_of_deletion
from service.jobs.job_yaml import read_fields
from service.jobs.operations import lock_job, pause_job, request_checkpoint, request_stop, resume_job, submit_job
from service.jobs.schemas import (
    CheckpointOut,
    GenerationOut,
    JobEvent,
    JobIncidentOut,
    JobOut,
    JobPace,
    JobSummary,
    LogOut,
    ResumeJob,
    StepOut,
)
from service.jobs.tables import ENDED, GenerationRow, JobRow, JobState
from service.metrics.step_times import step_seconds
from service.paging import ManyPagesOf, Pages, PagesOf
from service.problems import ProblemError, invalid, not_found

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
JOB_FILE_BYTES_MAX = 1024 * 1024
BODY_BYTES_MAX = {router.prefix: JOB_FILE_BYTES_MAX}
WATCH_LOOK_S = 1.0
WATCH_STEPS_MAX = 500
PartT = TypeVar("PartT", JobFile, JobChange)
_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {}, "application/yaml": {}}}}


async def read_job_file(request: Request, context: ContextOf) -> JobFile:
    """The job file in the body, as JSON or YAML. 422 names each field and the rule it breaks."""
    return await _read(request, context, check_job_file)


async def read_change(request: Request, context: ContextOf) -> JobChange:
    """What is to be changed. 422 names each field that may not be changed, and why."""
    return await _read(request, context, check_change)


async def _read(request: Request, context: Context, check: Callable[[Any], PartT]) -> PartT:
    body = await request.body()
    try:
        return await context.people.compute(lambda: check(read_fields(body)))
    except JobFileError as error:
        raise invalid(*error.problems) from error


@router.post("", status_code=201, operation_id="submit_job", summary="Register a job", openapi_extra=_BODY)
def submit(
    context: ContextOf, actor: OperatorOf, job_file: Annotated[JobFile, Depends(read_job_file)], session: SessionOf
) -> JobSummary:
    """The job starts as soon as enough nodes are ready; until then `reason` says what it waits for."""
    now = context.clock()
    row = submit_job(session, job_file, now=now)
    note(session, actor, "submit_job", row.job_id, now=now)
    return JobSummary.of(row, None)


@router.get("", operation_id="list_jobs", summary="List jobs, newest first")
def list_all(
    session: SessionOf,
    pages: PagesOf,
    match: Annotated[
        Text | None, Query(max_length=128, description="Only where id, random part of the id or name begins so.")
    ] = None,
    name: Annotated[Text | None, Query(max_length=128, description="Only where the name begins so.")] = None,
    state: Annotated[
        list[JobState] | None,
        Query(max_length=len(JobState), description="Only in this state; may be given several times."),
    ] = None,
) -> list[JobSummary]:
    """Every job, also ended ones."""
    rows = queries.list_jobs(session, pages, match=match, name=name, states=state or ())
    active = queries.active_rows(session, rows)
    return [JobSummary.of(row, active.get(row.job_id)) for row in rows]


@router.get("/{job_id}", operation_id="show_job", summary="Show one job")
def show(session: SessionOf, job_id: JobId, response: Response) -> JobOut:
    """With its newest generations and checkpoints, oldest first, and its standing plans."""
    row = _job(session, job_id)
    summary = JobSummary.of(row, queries.active_row(session, row))
    newest = Pages(queries.SHOWN_MAX)
    checkpoints = list_checkpoints(session, newest, job_id)[::-1]
    handoff = open_handoff(session, job_id)
    response.headers["ETag"] = version_of(row.spec)
    return JobOut(
        **summary.model_dump(),
        spec=queries.job_file_of(row).without_secrets(),
        generations=[GenerationOut.of(item) for item in queries.list_generations(session, newest, job_id)[::-1]],
        checkpoints=[CheckpointOut.of(item, row) for item in checkpoints],
        pace=JobPace.of(row, queries.steps_per_s(session, row)),
        step_seconds=dict(step_seconds(session, job_id)),
        standing_plans=row.standing_plans,
        layouts_by_count=row.layouts_by_count,
        open_handoff=str(handoff.handoff_id) if handoff else None,
        checkpoint_asked=row.awaits_checkpoint,
    )


@router.post("/{job_id}/stop", operation_id="stop_job", summary="Stop a job")
def stop(context: ContextOf, session: SessionOf, actor: OperatorOf, job_id: JobId) -> JobSummary:
    """Its ranks end after their step, with a checkpoint if the job file has `checkpoint`. Stopping a stopped job
    changes nothing."""
    now = context.clock()
    row = request_stop(session, job_id, now=now)
    note(session, actor, "stop_job", job_id, now=now)
    return JobSummary.of(row, queries.active_row(session, row))


@router.patch("/{job_id}", operation_id="update_job", summary="Change a job", openapi_extra=_BODY)
def update(
    context: ContextOf,
    actor: OperatorOf,
    known: PreconditionOf,
    job_id: JobId,
    change: Annotated[JobChange, Depends(read_change)],
    session: SessionOf,
) -> JobSummary:
    """What is not named stays. `stop` and `checkpoint` only while the job has no ranks, which read them when they
    start: pause it first."""
    now = context.clock()
    row = lock_job(session, job_id)
    known.check(f"job {job_id}", version_of(row.spec))
    change_job(session, row, change, newest_checkpoint(session, row, queries.job_file_of(row)), now=now)
    note(session, actor, "update_job", job_id, now=now, **change.model_dump(mode="json", exclude_unset=True))
    return JobSummary.of(row, queries.active_row(session, row))


@router.delete("/{job_id}", status_code=204, operation_id="delete_job", summary="Delete a job that has ended")
async def delete(context: ContextOf, actor: OperatorOf, known: PreconditionOf, job_id: JobId) -> None:
    """With its steps, logs, handoffs and generations, some at a time. Its checkpoints on disk stay, and so does what it
    took in the ledger. After a 503, delete it again: what is gone already stays gone."""

    def check(row: JobRow) -> None:
        known.check(f"job {job_id}", version_of(row.spec))

    def work() -> None:
        for session in parts_of_deletion(context.people.sessions, job_id, check):
            note(session, actor, "delete_job", job_id, now=context.clock())

    await context.people.run(work)


@router.post("/{job_id}/pause", operation_id="pause_job", summary="Let a job stand until it is resumed")
def pause(context: ContextOf, session: SessionOf, actor: OperatorOf, job_id: JobId) -> JobSummary:
    """Its ranks end after their step, with a checkpoint, and other jobs may use its nodes. Pausing a paused job changes
    nothing."""
    now = context.clock()
    row = pause_job(session, job_id, who=actor.name, now=now)
    note(session, actor, "pause_job", job_id, now=now)
    return JobSummary.of(row, queries.active_row(session, row))


@router.post("/{job_id}/checkpoint", operation_id="checkpoint_job", summary="Write a checkpoint now")
def checkpoint(context: ContextOf, session: SessionOf, actor: OperatorOf, job_id: JobId) -> JobSummary:
    """It is written in the background after the next step; `checkpoint_asked` of the job is true until then."""
    now = context.clock()
    row = request_checkpoint(session, job_id, now=now)
    note(session, actor, "checkpoint_job", job_id, now=now)
    return JobSummary.of(row, queries.active_row(session, row))


@router.post("/{job_id}/resume", operation_id="resume_job", summary="Continue a job that is paused or has ended")
def resume(context: ContextOf, session: SessionOf, actor: OperatorOf, job_id: JobId, how: ResumeJob) -> JobSummary:
    """From its newest checkpoint that is not damaged, or the one of `from_step`, as soon as enough nodes are ready."""
    job, goes_back = _job(session, job_id), how.from_step is not None
    job_file = queries.job_file_of(job)
    if how.from_step is None:
        chosen = newest_checkpoint(session, job, job_file)
    else:
        chosen = checkpoint_of_step(session, job, job_file, how.from_step)
    now = context.clock()
    row = resume_job(session, job_id, chosen, steps=how.steps, goes_back=goes_back, now=now)
    note(session, actor, "resume_job", job_id, now=now, steps=how.steps, from_step=how.from_step)
    return JobSummary.of(row, queries.active_row(session, row))


@router.get("/{job_id}/generations", operation_id="list_generations", summary="Generations of a job, newest first")
def generations(session: SessionOf, job_id: JobId, pages: PagesOf) -> list[GenerationOut]:
    """Those that became active."""
    _job(session, job_id)
    return [GenerationOut.of(row) for row in queries.list_generations(session, pages, job_id)]


@router.get("/{job_id}/checkpoints", operation_id="list_checkpoints", summary="Checkpoints of a job, newest first")
def checkpoints(session: SessionOf, job_id: JobId, pages: PagesOf) -> list[CheckpointOut]:
    """Those that are complete, the highest step first, also those that no start uses any more."""
    job = _job(session, job_id)
    return [CheckpointOut.of(row, job) for row in list_checkpoints(session, pages, job_id)]


@router.get(
    "/{job_id}/incidents",
    operation_id="list_job_incidents",
    summary="Incidents without a notice, newest first",
)
def job_incidents(session: SessionOf, job_id: JobId, pages: PagesOf) -> list[JobIncidentOut]:
    """Losses, hangs and checkpoints that failed."""
    _job(session, job_id)
    return [JobIncidentOut.of(row) for row in list_job_incidents(session, pages, job_id)]


@router.get("/{job_id}/steps", operation_id="list_steps", summary="Steps of a job", response_model=list[StepOut])
def steps(
    session: SessionOf,
    response: Response,
    job_id: JobId,
    pages: ManyPagesOf,
    after: Annotated[int, Query(ge=-1, le=COUNT_MAX, description="Only steps above this one.")] = -1,
) -> Response:
    """In the order they were made. A step repeated after a checkpoint appears once for each generation."""
    _job(session, job_id)
    rows = queries.list_steps(session, pages, job_id, after=after)
    return answer_with(map(StepOut.of, rows), StepOut, response)


@router.get("/{job_id}/logs", operation_id="list_logs", summary="Output of a job's ranks", response_model=list[LogOut])
def logs(
    session: SessionOf,
    response: Response,
    job_id: JobId,
    rank: Annotated[int | None, Query(ge=0, lt=RANKS_MAX)] = None,
    after: Annotated[int, Query(ge=0, le=COUNT_MAX, description="Only what came after this log_id.")] = 0,
    limit: Annotated[int, Query(ge=1, le=2_000)] = 200,
) -> Response:
    """Without `after`, the newest pieces. The service keeps a limited amount and drops the oldest output."""
    _job(session, job_id)
    rows = queries.logs_of(session, job_id, rank=rank, after=after, limit=limit)
    return answer_with(map(LogOut.of, rows), LogOut, response)


async def known_job(context: ContextOf, job_id: JobId) -> str:
    """The job's id. Raises 404 before the stream begins, since afterwards the status can no longer be sent."""
    return await context.people.run(_known_job, context, job_id)


def _known_job(context: Context, job_id: str) -> str:
    with context.people.sessions() as session:
        return _job(session, job_id).job_id


@router.get(
    "/{job_id}/watch",
    operation_id="watch_job",
    summary="A stream of everything that happens to a job",
    response_class=EventSourceResponse,
)
async def watch(context: ContextOf, job_id: Annotated[str, Depends(known_job)]) -> AsyncIterator[ServerSentEvent]:
    """One `job` event at the start and at every change; ends after the job has ended."""
    last_step, before = -1, ""
    async with context.hub.waiter(job_topic(job_id)) as changed:
        while not context.hub.stopping:
            changed.clear()
            try:
                event = await context.people.run(_event, context, job_id, last_step)
            except ProblemError:
                continue  # Too many others are at work, and this one has waited for a while already.
            if event is None:
                return
            content = event.model_dump_json()
            if content != before:
                before = content
                last_step = max((step.step for step in event.steps), default=last_step)
                yield ServerSentEvent(data=event, event="job")
            if event.job.state in ENDED:
                return
            try:
                async with asyncio.timeout(WATCH_LOOK_S):
                    await changed.wait()
            except TimeoutError:
                continue


def _event(context: Context, job_id: str, last_step: int) -> JobEvent | None:
    with context.people.sessions() as session:
        row = session.get(JobRow, job_id)
        if row is None:
            return None
        # A stream begins with the newest steps. A job that restarted from a checkpoint repeats old step numbers: they
        # are shown again.
        after = row.last_step - WATCH_STEPS_MAX if last_step < 0 else min(last_step, row.last_step)
        handoff = next(iter(list_handoffs(session, Pages(1), job_id=job_id)), None)
        active = session.get(GenerationRow, (job_id, row.active_generation)) if row.active_generation else None
        return JobEvent(
            job=JobSummary.of(row, active),
            pace=JobPace.of(row, queries.steps_per_s(session, row)),
            steps=[
                StepOut.of(step) for step in queries.list_steps(session, Pages(WATCH_STEPS_MAX), job_id, after=after)
            ],
            handoff=HandoffOut.of(handoff).model_dump(mode="json", by_alias=True) if handoff else None,
        )


def _job(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id)
    if row is None:
        raise not_found("job", job_id)
    return row
