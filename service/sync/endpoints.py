"""`POST /agent/v1/sync` and the wake stream `GET /agent/v1/wake`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy import func, select

from agent.protocol.sync import REPORT_BYTES_MAX, SyncOrders, WakeEvent
from liver_core.layout.limits import NodeId
from service.context import AGENT_ONLY, Context, ContextOf
from service.db.wake import node_topic
from service.jobs.tables import JobMemberRow, JobRow
from service.problems import ProblemError, unavailable
from service.sync.operations import apply_report
from service.sync.orders import build_orders
from service.sync.reading import Reading, read_report
from service.turns import LostTurn

router = APIRouter(prefix="/agent/v1", tags=["agents"], dependencies=[AGENT_ONLY])
BODY_BYTES_MAX = {f"{router.prefix}/sync": REPORT_BYTES_MAX}
READ_HERE_BYTES_MAX = 64 * 1024
WAKE_LOOK_S = 2.0
"""How often an idle wake stream checks the orders itself, in case a NOTIFY was lost."""

_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {}}}}


async def reading_of(request: Request) -> Reading:
    """What the body holds. A large one is read off the event loop, for many errors take long to name."""
    body = await request.body()
    return read_report(body) if len(body) <= READ_HERE_BYTES_MAX else await run_in_threadpool(read_report, body)


@router.post(
    "/sync",
    operation_id="sync",
    summary="Report the state of one node, get its orders",
    response_model=SyncOrders,
    openapi_extra=_BODY,
)
async def sync(request: Request, context: ContextOf, reading: Annotated[Reading, Depends(reading_of)]) -> Response:
    """Level-triggered and idempotent on (agent_incarnation, report_seq). 409: another protocol version, or a later
    start of this node's agent has replaced this one. 503: an earlier report of this node is still being stored, and a
    newer one waits, or this one has waited too long."""
    gone = asyncio.create_task(_until_gone(request))
    try:
        async with context.turns.of(reading.report.node.node_id, gone):
            orders = await run_in_threadpool(_sync, context, reading, gone.done)
    except LostTurn as error:
        raise ProblemError(unavailable(str(error))) from None
    finally:
        gone.cancel()
    return Response(orders, media_type="application/json")


async def _until_gone(request: Request) -> None:
    """Return when the agent has closed its connection: after the body, nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sync(context: Context, reading: Reading, is_gone: Callable[[], bool]) -> str:
    with context.sessions.begin() as session:
        session.connection()
        if is_gone():
            raise LostTurn(f"the agent of node {reading.report.node.node_id} has gone before its report was stored")
        orders = build_orders(apply_report(session, reading, now=context.clock()), poll_s=context.settings.agent_poll_s)
    return orders.model_dump_json()


@router.get(
    "/wake",
    operation_id="wake",
    summary="A stream with an event whenever the node should sync",
    response_class=EventSourceResponse,
)
async def wake(context: ContextOf, node_id: Annotated[NodeId, Query()]) -> AsyncIterator[ServerSentEvent]:
    """One event at the start and one per change of the node's orders. Only a hint: sync also every `poll_s`."""
    sent = -1
    async with context.hub.waiter(node_topic(node_id)) as changed:
        while not context.hub.stopping:
            changed.clear()
            orders_seq = await run_in_threadpool(_orders_seq, context, node_id)
            if orders_seq != sent:
                sent = orders_seq
                yield ServerSentEvent(data=WakeEvent(orders_seq=orders_seq), event="wake", id=str(orders_seq))
            try:
                async with asyncio.timeout(WAKE_LOOK_S):
                    await changed.wait()
            except TimeoutError:
                continue


def _orders_seq(context: Context, node_id: str) -> int:
    statement = (
        select(func.coalesce(func.max(JobRow.orders_seq), 0))
        .join(JobMemberRow, JobMemberRow.job_id == JobRow.job_id)
        .where(JobMemberRow.node_id == node_id)
    )
    with context.sessions() as session:
        return session.execute(statement).scalar_one()
