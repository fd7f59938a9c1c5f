"""REST of replays: what a job would have done on a trace of capacity."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile import JobFile
from agent.protocol.jobfile_check import JobFileError, check_job_file
from service.context import PERSON_ONLY, Context, ContextOf
from service.edge.routes import PeoplesRoute
from service.jobs.job_yaml import read_fields
from service.problems import field_problems, invalid
from service.simulation.traces import TraceFormat
from service.what_if.queries import known_job, node_kind, own_events
from service.what_if.rules import Question
from service.what_if.schemas import TraceIn, WhatIfAsk, WhatIfOut

router = APIRouter(prefix="/api/v1/what-if", tags=["what-if"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
BODY_BYTES_MAX = {router.prefix: 12 * 1024 * 1024}
"""A trace of 4 MiB, prices and a job file of 1 MiB each, and what JSON adds where it quotes them."""
_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {}}}}


async def read_ask(request: Request, context: ContextOf) -> WhatIfAsk:
    """What is asked. 422 names each field and the rule it breaks."""
    body = await request.body()
    try:
        return await context.people.compute(WhatIfAsk.model_validate_json, body)
    except ValidationError as error:
        raise invalid(*field_problems(error)) from None


@router.post(
    "",
    operation_id="what_if",
    summary="What a job would have done on a trace of capacity",
    response_model=WhatIfOut,
    openapi_extra=_BODY,
)
async def ask(request: Request, context: ContextOf, asked: Annotated[WhatIfAsk, Depends(read_ask)]) -> Response:
    """A replay under LiveR's policy and what it is compared with. Nothing is changed and nothing stored; a few run at a
    time (then 429), each for a limited time (then 422, with what to change)."""
    own = await context.people.compute(_job_file, asked.job_file) if asked.job_file is not None else None
    replay = await context.people.run(_replay, context, asked, own)
    answer = await request.app.state.replays.run(replay)
    # A repeat under the same Idempotency-Key is replayed again, and comes to the same.
    return Response(answer, media_type="application/json", headers={"Cache-Control": "no-store"})


def _replay(context: Context, asked: WhatIfAsk, own: JobFile | None) -> Question:
    """All that the replay needs, with one short read of the database. `own`: the job file that came with it."""
    trace, lasts_s = asked.trace, 0.0
    with context.people.sessions() as session:
        known = known_job(session, asked.job) if asked.job is not None else None
        kind = node_kind(session)
        if asked.builtin is not None:
            hours = int(asked.builtin.removeprefix("own-").removesuffix("h"))
            text = own_events(session, hours=hours, now=context.clock())
            trace, lasts_s = TraceIn(name=asked.builtin, format=TraceFormat.EVENTS, text=text), hours * 3_600.0
    job = known.job if known is not None else own
    assert job is not None and trace is not None
    if not trace.text.strip():
        rule = "is empty" if asked.trace is not None else f"the service had no node in {asked.builtin}"
        raise invalid(FieldProblem(field="trace.text" if asked.trace is not None else "builtin", rule=rule))
    knobs = asked.knobs
    if kind is not None:
        slots, device = knobs.slots_per_node or min(kind[0], 64), knobs.device or kind[1]
        knobs = knobs.model_copy(update={"slots_per_node": slots, "device": device})
    return Question(
        job=job,
        trace_name=trace.name,
        trace_format=trace.format,
        trace_text=trace.text,
        prices=asked.prices,
        knobs=knobs,
        measured=known.measured if known is not None else (),
        lasts_s=lasts_s,
        machines=asked.machines,
    )


def _job_file(text: str) -> JobFile:
    try:
        return check_job_file(read_fields(text.encode()))
    except JobFileError as error:
        named = (FieldProblem(field=f"job_file.{problem.field}", rule=problem.rule) for problem in error.problems)
        raise invalid(*named) from None
