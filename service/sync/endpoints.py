"""`POST /agent/v1/sync` and the wake stream `GET /agent/v1/wake`."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import ValidationError
from sqlalchemy import func, select

from agent.protocol import PROTOCOL_VERSION, errors
from agent.protocol.errors import FieldProblem, Problem, version_problem
from agent.protocol.sync import REPORT_BYTES_MAX, SyncOrders, SyncReport, WakeEvent
from liver_core.layout.limits import NodeId
from service.context import Context, ContextOf, NodeOf
from service.db.wake import node_topic
from service.jobs.tables import JobMemberRow, JobRow
from service.problems import ProblemError, field_problems, invalid, unavailable
from service.sync.operations import apply_report
from service.sync.orders import build_orders
from service.tokens.operations import Caller
from service.turns import LostTurn

router = APIRouter(prefix="/agent/v1", tags=["agents"])
WAKE_LOOK_S = 2.0
"""How often an idle wake stream checks the orders itself, in case a NOTIFY was lost."""

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": SyncReport.model_json_schema(ref_template="#/components/schemas/{model}")}
        },
    }
}


async def read_report(request: Request) -> SyncReport:
    """The report in the body. A wrong protocol version is reported before any other error.

    Not parsed by FastAPI, because the wire format is strict JSON: a time is a string there, but "1" is not 1.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > REPORT_BYTES_MAX:
            raise ProblemError(
                Problem(
                    title="Report too large",
                    status=413,
                    code=errors.TOO_LARGE,
                    detail=f"a report may have at most {REPORT_BYTES_MAX} bytes; send fewer logs and steps at a time",
                )
            )
    try:
        report = SyncReport.model_validate_json(bytes(body))
    except ValidationError as error:
        _check_version(body)
        raise invalid(*field_problems(error)) from error
    # For the schema an absent version means the present one; here it is an error.
    if report.protocol_version != PROTOCOL_VERSION or "protocol_version" not in report.model_fields_set:
        _check_version(body)
    return report


def _check_version(body: bytearray) -> None:
    """Raises for a body that is not JSON and for a wrong version, so that these come before errors in fields."""
    try:
        seen = json.loads(body)
    except ValueError as error:
        raise invalid(FieldProblem(field="(whole)", rule=f"must be JSON: {error}")) from error
    version = seen.get("protocol_version") if isinstance(seen, dict) else None
    if version != PROTOCOL_VERSION:
        raise ProblemError(version_problem(version))


@router.post(
    "/sync",
    operation_id="sync",
    summary="Report the state of one node, get its orders",
    response_model=SyncOrders,
    openapi_extra=_BODY,
)
async def sync(
    request: Request, context: ContextOf, caller: NodeOf, report: Annotated[SyncReport, Depends(read_report)]
) -> Response:
    """Level-triggered and idempotent on (agent_incarnation, report_seq). 409: another protocol version, or a later
    start of this node's agent has replaced this one. 503: an earlier report of this node is still being stored, and a
    newer one waits, or this one has waited too long."""
    _check_node(caller, report.node.node_id, field="node.node_id")
    gone = asyncio.create_task(_until_gone(request))
    try:
        async with context.turns.of(report.node.node_id, gone):
            orders = await run_in_threadpool(_sync, context, report, gone.done)
    except LostTurn as error:
        raise ProblemError(unavailable(str(error))) from None
    finally:
        gone.cancel()
    return Response(orders, media_type="application/json")


async def _until_gone(request: Request) -> None:
    """Return when the agent has closed its connection: after the body, nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sync(context: Context, report: SyncReport, is_gone: Callable[[], bool]) -> str:
    with context.sessions.begin() as session:
        session.connection()
        if is_gone():
            raise LostTurn(f"the agent of node {report.node.node_id} has gone before its report was stored")
        intake, settings = apply_report(session, report, now=context.clock()), context.settings
        orders = build_orders(intake, poll_s=settings.agent_poll_s, lost_after_s=settings.lost_after_s)
    return orders.model_dump_json()


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


async def _own_node(caller: NodeOf, node_id: Annotated[NodeId, Query()]) -> str:
    _check_node(caller, node_id, field="node_id")
    return node_id


@router.get(
    "/wake",
    operation_id="wake",
    summary="A stream with an event whenever the node should sync",
    response_class=EventSourceResponse,
)
async def wake(context: ContextOf, node_id: Annotated[NodeId, Depends(_own_node)]) -> AsyncIterator[ServerSentEvent]:
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
