"""REST of the stream of changes: one a browser."""

from collections.abc import AsyncIterator
from time import monotonic
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy.exc import SQLAlchemyError

from liver_core.layout.limits import JobId
from service.context import PERSON_ONLY, CallerOf, Context, ContextOf, find_caller, find_visitor
from service.edge.credentials import bearer_of, cookie_of
from service.edge.routes import PeoplesRoute
from service.events.feed import Feed, Stream
from service.events.schemas import BeatEvent, HelloEvent
from service.problems import ProblemError

router = APIRouter(prefix="/api/v1/events", tags=["events"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
BEAT_S = 5.0
WAIT_S = 1.0
JOBS_MAX = 16


async def stream_of(
    request: Request,
    caller: CallerOf,
    job_id: Annotated[
        list[JobId] | None,
        Query(max_length=JOBS_MAX, description="Also the steps of this job; may be given several times."),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(max_length=64, description="The last id that was got: what came after it follows.")
    ] = None,
) -> AsyncIterator[Stream]:
    """A place among the streams, before anything is answered."""
    feed: Feed = request.app.state.feed
    async with feed.subscribed(caller, job_id or (), last_event_id) as stream:
        yield stream


@router.get("", operation_id="watch", summary="A stream of everything that changes", response_class=EventSourceResponse)
async def watch(
    request: Request, context: ContextOf, stream: Annotated[Stream, Depends(stream_of)]
) -> AsyncIterator[ServerSentEvent]:
    """`hello`, then `jobs`, `handoffs`, `incidents`, `nodes`, `steps` and `audit` as they change, and `beat` every five
    seconds; what each holds is described as HelloEvent, JobsEvent and so on. After a lost connection, Last-Event-ID
    gets what was missed as long as it is kept. Ends with the token or the session."""
    feed: Feed = request.app.state.feed
    hello = HelloEvent(at=context.clock(), resumed=stream.resumed)
    yield ServerSentEvent(data=hello, event="hello", id=stream.id)
    beat_at = monotonic() + BEAT_S
    while not context.hub.stopping:
        if stream.missed():
            yield ServerSentEvent(data=HelloEvent(at=context.clock(), resumed=False), event="hello", id=stream.id)
        for number, event in stream.next():
            yield ServerSentEvent(raw_data=event.data, event=event.name, id=number)
        if monotonic() >= beat_at:
            if not await _still_may(context, request):
                return
            yield ServerSentEvent(data=BeatEvent(at=context.clock()), event="beat")
            beat_at = monotonic() + BEAT_S
        await feed.wait(WAIT_S)


async def _still_may(context: Context, request: Request) -> bool:
    """Whether the token or the session of the stream still works; it does while that cannot be looked up."""
    secret = cookie_of(request.scope)
    try:
        if secret:
            await find_visitor(context, secret)
        else:
            await find_caller(context, bearer_of(request.headers), context.people)
    except ProblemError as error:
        return error.problem.status != 401
    except SQLAlchemyError:
        return True
    return True
