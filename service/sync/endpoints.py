"""`POST /agent/v1/sync` and the wake stream `GET /agent/v1/wake`."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy.exc import SQLAlchemyError

from agent.protocol import errors
from agent.protocol.errors import FieldProblem, Problem
from agent.protocol.sync import REPORT_BYTES_MAX, SyncOrders
from agent.protocol.wake_up import WakeEvent
from liver_core.layout.limits import NodeId
from service.context import CALLER, Context, ContextOf, NodeOf, require_node
from service.db.wake import node_topic
from service.edge.credentials import bearer_of
from service.jobs.waking import wake_late
from service.problems import ProblemError, unavailable
from service.sync.answers import answer
from service.sync.calm import CalmAsk
from service.sync.operations import apply_report
from service.sync.reading import Reading, read_report
from service.tokens.operations import Caller
from service.turns import LostTurn

router = APIRouter(prefix="/agent/v1", tags=["agents"])
SHORT = ("POST", f"{router.prefix}/sync")
"""What is answered past FastAPI's routing."""
BODY_BYTES_MAX = {SHORT[1]: REPORT_BYTES_MAX}
READ_HERE_BYTES_MAX = 64 * 1024
END_LOOK_S = 15.0
"""How often an idle wake stream looks whether it ends, should nobody wake it then."""

_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {}}}}


async def _reading_of(request: Request, context: Context) -> Reading:
    """What the body holds. A large one is read off the event loop, for many errors take long to name."""
    body = await request.body()
    return read_report(body) if len(body) <= READ_HERE_BYTES_MAX else await context.agents.compute(read_report, body)


@router.post(
    "/sync",
    operation_id="sync",
    summary="Report the state of one node, get its orders",
    response_model=SyncOrders,
    openapi_extra=_BODY,
    dependencies=[Depends(require_node)],  # For the API's description: the shortcut goes past it.
)
async def sync(request: Request) -> Response:
    """Level-triggered and idempotent on (agent_incarnation, report_seq). 409: another protocol version, or a later
    start of this node's agent has replaced this one. 503: an earlier report of this node is still being stored, and a
    newer one waits, or this one has waited too long."""
    context: Context = request.app.state.context
    caller = await require_node(request.scope[CALLER])
    reading = await _reading_of(request, context)
    node_id = reading.report.node.node_id
    _check_node(caller, node_id, field="node.node_id")
    arrived, gone = context.clock(), asyncio.create_task(_until_gone(request))
    context.listening.waits(node_id, arrived)
    try:
        async with context.turns.of(node_id, gone):
            orders = await context.calm.answer(CalmAsk(reading, arrived, gone.done))
            if orders is None:
                orders = await context.agents.run(_sync, context, reading, caller, gone.done, arrived, alone=True)
    except LostTurn as error:
        context.listening.tried(node_id, context.clock())
        raise ProblemError(unavailable(str(error))) from None
    except (SQLAlchemyError, ProblemError) as error:
        if not isinstance(error, ProblemError) or error.problem.status == 503:
            context.listening.tried(node_id, context.clock())
        raise
    finally:
        gone.cancel()
        context.listening.is_done(node_id)
    return Response(orders, media_type="application/json")


async def _until_gone(request: Request) -> None:
    """Return when the agent has closed its connection: after the body, nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sync(
    context: Context, reading: Reading, caller: Caller, is_gone: Callable[[], bool], arrived: datetime | None = None
) -> str:
    settings = context.settings
    presses = context.pressing.at_work() if reading.report.notices else nullcontext()
    with presses, context.agents.sessions() as session:
        with session.begin():
            session.connection()
            if is_gone():
                raise LostTurn(f"the agent of node {reading.report.node.node_id} has gone before its report was stored")
            silences = {"silent_after_s": settings.silent_after_s, "gone_after_s": settings.gone_after_s}
            intake = apply_report(session, reading, caller, **silences, now=context.clock(), arrived=arrived)
        if intake.passed_over:
            with session.begin():
                wake_late(session, intake.passed_over, now=context.clock())
        # Others are woken, and nobody waits for a lock, while orders are made.
        limits = {"poll_s": settings.agent_poll_s, "lost_after_s": settings.lost_after_s}
        return answer(intake, context.orders, context.told, **limits)


def _check_node(caller: Caller, node_id: str, *, field: str) -> None:
    """Raises 403 for a token of another node."""
    if caller.node_id != node_id:
        raise ProblemError(
            Problem(
                title="Forbidden",
                status=403,
                code=errors.FORBIDDEN,
                detail=f"{field}: this token speaks for node {caller.node_id} only, not for {node_id}",
                errors=(FieldProblem(field=field, rule=f"must be {caller.node_id}"),),
            )
        )


@dataclass(frozen=True, slots=True)
class WakeReader:
    """Who follows a wake stream, and with what token: `is_known` while the token is certain not to have been revoked,
    `is_over` once it has expired."""

    node_id: str
    is_known: Callable[[], bool]
    is_over: Callable[[], bool]


async def listener_of(
    request: Request, context: ContextOf, caller: NodeOf, node_id: Annotated[NodeId, Query()]
) -> WakeReader:
    """Raises 403 for a token of another node."""
    _check_node(caller, node_id, field="node_id")
    token, expires_at = bearer_of(request.headers), caller.expires_at
    return WakeReader(
        node_id,
        is_known=lambda: context.recent_nodes.find(token, now=context.clock()) is not None,
        is_over=lambda: expires_at is not None and context.clock() >= expires_at,
    )


@router.get(
    "/wake",
    operation_id="wake",
    summary="A stream with an event whenever the node should sync",
    response_class=EventSourceResponse,
)
async def wake(
    context: ContextOf, listener: Annotated[WakeReader, Depends(listener_of)]
) -> AsyncIterator[ServerSentEvent]:
    """One event at the start and one per change of the node's orders, with the new orders where they are at hand. Only
    a hint: sync at each, and also every `poll_s`. Ends when its token expires: come again with another."""
    events = itertools.count()
    async with context.hub.waiter(node_topic(listener.node_id)) as changed:
        yield _event(next(events), None)
        while not context.hub.stopping and not listener.is_over():
            with suppress(TimeoutError):
                async with asyncio.timeout(END_LOOK_S):
                    await changed.wait()
            if changed.is_set():
                changed.clear()
                is_told = listener.is_known() and not context.hub.stopping
                yield _event(next(events), await context.news.of(listener.node_id) if is_told else None)


def _event(number: int, orders: str | None) -> ServerSentEvent:
    """`orders`: as JSON of `WakeOrders`."""
    event = WakeEvent(number=number).model_dump_json(exclude={"orders"})
    if orders is not None:
        event = f'{event[:-1]},"orders":{orders}}}'
    return ServerSentEvent(raw_data=event, event="wake", id=str(number))
