"""REST of jobs: submit, list, show, stop, checkpoint, resume, steps, logs, watch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.jobfile import JobFile
from agent.protocol.jobfile_check import JobFileError, check_job_file
from liver_core.layout.limits import COUNT_MAX, RANKS_MAX, JobId, Text
from service.audit.operations import note
from service.context import PERSON_ONLY, Context, ContextOf, OperatorOf, SessionOf
from service.db.wake import job_topic
from service.handoffs.queries import list_handoffs, open_handoff
from service.handoffs.schemas import HandoffOut
from service.jobs import queries
from service.jobs.job_yaml import read_fields
from service.jobs.operations import request_checkpoint, request_stop, resume_job, submit_job
from service.jobs.schemas import (
    CheckpointOut,
    GenerationOut,
    JobEvent,
    JobOut,
    JobPace,
    JobSummary,
    LogOut,
    ResumeJob,
    StepOut,
)
from service.jobs.tables import ENDED, CheckpointRow, GenerationRow, JobRow
from service.problems import invalid, not_found

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], dependencies=[PERSON_ONLY])
JOB_FILE_BYTES_MAX = 1024 * 1024
BODY_BYTES_MAX = {router.prefix: JOB_FILE_BYTES_MAX}
WATCH_LOOK_S = 1.0
WATCH_STEPS_MAX = 500
_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {}, "application/yaml": {}}}}


async def read_job_file(request: Request) -> JobFile:
    """The job file in the body, as JSON or YAML. 422 names each field and the rule it breaks."""
    body = await request.body()
    try:
        # Off the event loop: agents are served meanwhile.
        return await run_in_threadpool(lambda: check_job_file(read_fields(body)))
    except JobFileError as error:
        raise invalid(*error.problems) from error


@router.post("", status_code=201, operation_id="submit_job", summary="Register a job", openapi_extra=_BODY)
def submit(
    context: ContextOf, session: SessionOf, actor: OperatorOf, job_file: Annotated[JobFile, Depends(read_job_file)]
) -> JobSummary:
    """The job starts as soon as enough nodes are ready; until then `reason` says what it waits for."""
    now = context.clock()
    row = submit_job(session, job_file, now=now)
    note(session, actor, "submit_job", row.job_id, now=now)
    return JobSummary.of(row, None)


@router.get("", operation_id="list_jobs", summary="List jobs, newest first")
def list_all(
    session: SessionOf,
    match: Annotated[
        Text | None, Query(max_length=128, description="Only where id, random part of the id or name begins so.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
) -> list[JobSummary]:
    """Every job, also ended ones."""
    rows = queries.list_jobs(session, match=match, limit=limit)
    return [JobSummary.of(row, queries.active_row(session, row)) for row in rows]


@router.get("/{job_id}", operation_id="show_job", summary="Show one job")
def show(session: SessionOf, job_id: JobId) -> JobOut:
    """With its generations, checkpoints and standing plans."""
    row = _job(session, job_id)
    summary = JobSummary.of(row, queries.active_row(session, row))
    checkpoints = session.scalars(
        select(CheckpointRow).where(CheckpointRow.job_id == job_id).order_by(CheckpointRow.step)
    )
    handoff = open_handoff(session, job_id)
    return JobOut(
        **summary.model_dump(),
        spec=queries.job_file_of(row).without_secrets(),
        generations=[GenerationOut.of(item) for item in queries.generations(session, job_id)],
        checkpoints=[CheckpointOut.of(item) for item in checkpoints],
        pace=JobPace.of(row, queries.steps_per_s(session, row)),
        step_seconds=dict(queries.step_seconds(session, job_id)),
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


@router.post("/{job_id}/checkpoint", operation_id="checkpoint_job", summary="Write a checkpoint now")
def checkpoint(context: ContextOf, session: SessionOf, actor: OperatorOf, job_id: JobId) -> JobSummary:
    """It is written in the background after the next step; `checkpoint_asked` of the job is true until then."""
    now = context.clock()
    row = request_checkpoint(session, job_id, now=now)
    note(session, actor, "checkpoint_job", job_id, now=now)
    return JobSummary.of(row, queries.active_row(session, row))


@router.post("/{job_id}/resume", operation_id="resume_job", summary="Continue a job that has ended")
def resume(context: ContextOf, session: SessionOf, actor: OperatorOf, job_id: JobId, how: ResumeJob) -> JobSummary:
    """From its newest checkpoint, as soon as enough nodes are ready."""
    newest = queries.newest_checkpoint(session, _job(session, job_id))
    now = context.clock()
    row = resume_job(session, job_id, newest, steps=how.steps, now=now)
    note(session, actor, "resume_job", job_id, now=now, steps=how.steps)
    return JobSummary.of(row, queries.active_row(session, row))


@router.get("/{job_id}/steps", operation_id="list_steps", summary="Steps of a job")
def steps(
    session: SessionOf,
    job_id: JobId,
    after: Annotated[int, Query(ge=-1, le=COUNT_MAX, description="Only steps above this one.")] = -1,
    limit: Annotated[int, Query(ge=1, le=20_000)] = 1_000,
) -> list[StepOut]:
    """In the order they were made. A step repeated after a checkpoint appears once for each generation."""
    _job(session, job_id)
    return [StepOut.of(row) for row in queries.steps_of(session, job_id, after=after, limit=limit)]


@router.get("/{job_id}/logs", operation_id="list_logs", summary="Output of a job's ranks")
def logs(
    session: SessionOf,
    job_id: JobId,
    rank: Annotated[int | None, Query(ge=0, lt=RANKS_MAX)] = None,
    after: Annotated[int, Query(ge=0, le=COUNT_MAX, description="Only what came after this log_id.")] = 0,
    limit: Annotated[int, Query(ge=1, le=2_000)] = 200,
) -> list[LogOut]:
    """Without `after`, the newest pieces. The service keeps a limited amount and drops the oldest output."""
    _job(session, job_id)
    return [LogOut.of(row) for row in queries.logs_of(session, job_id, rank=rank, after=after, limit=limit)]


def known_job(context: ContextOf, job_id: JobId) -> str:
    """The job's id. Raises 404 before the stream begins, since afterwards the status can no longer be sent."""
    with context.sessions() as session:
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
            event = await run_in_threadpool(_event, context, job_id, last_step)
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
    with context.sessions() as session:
        row = session.get(JobRow, job_id)
        if row is None:
            return None
        # A stream begins with the newest steps. A job that restarted from a checkpoint repeats old step numbers: they
        # are shown again.
        after = row.last_step - WATCH_STEPS_MAX if last_step < 0 else min(last_step, row.last_step)
        handoff = next(iter(list_handoffs(session, job_id=job_id, limit=1)), None)
        active = session.get(GenerationRow, (job_id, row.active_generation)) if row.active_generation else None
        return JobEvent(
            job=JobSummary.of(row, active),
            pace=JobPace.of(row, queries.steps_per_s(session, row)),
            steps=[StepOut.of(step) for step in queries.steps_of(session, job_id, after=after, limit=WATCH_STEPS_MAX)],
            handoff=HandoffOut.of(handoff).model_dump(mode="json", by_alias=True) if handoff else None,
        )


def _job(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id)
    if row is None:
        raise not_found("job", job_id)
    return row
