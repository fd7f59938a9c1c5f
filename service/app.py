"""Makes the application: database, schema, first tokens, wake hub, reconcilers, routes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache

from fastapi import APIRouter, FastAPI, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import BaseRoute

from agent.protocol import PROTOCOL_VERSION
from agent.protocol.jobfile import JobFile
from agent.protocol.sync import SyncReport
from liver_core.installation import release
from liver_core.systemd_notify import ServiceManager
from service import problems
from service.audit import endpoints as audit
from service.capacity import endpoints as capacity
from service.clouds import endpoints as clouds
from service.clouds.gcp import push
from service.clouds.gcp.push_tokens import GoogleKeys
from service.clouds.hearing import AccountChannels
from service.console import endpoints as console
from service.context import PERSON_ONLY, Clock, Context
from service.db.clock import DatabaseClock
from service.db.engine import Database, check_data_dir, open_database
from service.db.upgrade import upgrade
from service.db.wake import WakeHub
from service.decisions import endpoints as decisions
from service.edge.description import describe
from service.edge.gate import Gate
from service.edge.shortcut import Shortcut
from service.events import endpoints as events
from service.events.feed import Feed
from service.events.schemas import EVENTS
from service.fleet import endpoints as fleet
from service.handoffs import endpoints as handoffs
from service.incidents import endpoints as incidents
from service.jobs import endpoints as jobs
from service.jobs.changes import JobChange
from service.jobs.queries import count_without_orders
from service.leases import endpoints as leases
from service.ledger import endpoints as ledger
from service.metrics import endpoints as metrics
from service.nodes import endpoints as nodes
from service.nodes.listening import BEAT_S
from service.notices import endpoints as notices
from service.outlook import endpoints as outlook
from service.peer_keys import endpoints as peer_keys
from service.reconcilers.runner import Reconcilers
from service.sessions import endpoints as sessions
from service.settings import ServiceSettings
from service.sync import endpoints as sync
from service.timeline import endpoints as timeline
from service.tokens import endpoints as tokens
from service.tokens.operations import ensure_first_tokens
from service.what_if import endpoints as what_if
from service.what_if.replaying import Replays
from service.what_if.schemas import WhatIfAsk
from service.wires import endpoints as wires

BODY_BYTES_MAX = {**sync.BODY_BYTES_MAX, **jobs.BODY_BYTES_MAX, **push.BODY_BYTES_MAX, **what_if.BODY_BYTES_MAX}
_log = logging.getLogger(__name__)


class Health(BaseModel):
    """Whether the service works, and its release."""

    status: str
    version: str
    protocol_version: int = PROTOCOL_VERSION
    detail: str = ""


@dataclass(slots=True)
class Running:
    """The parts of the application while it serves."""

    context: Context
    reconcilers: Reconcilers | None
    hearing: AccountChannels | None


def create_app(
    settings: ServiceSettings,
    *,
    clock: Clock | None = None,
    database: Database | None = None,
    manager: ServiceManager | None = None,
) -> FastAPI:
    """The application. The database is opened here, so that an error comes before the first request.

    Raises StartError. `clock`: the database's, unless tests give another. `database`: given by tests, which then also
    close it. `manager`: who is told that the service is ready and alive.
    """
    owned = database is None
    database = database or open_database(settings)
    upgrade(database.engine)
    clock = clock or DatabaseClock(database.engine)
    context = Context(settings, database, WakeHub(database.engine.url, database.outage), clock)
    _write_first_tokens(context)
    app = FastAPI(
        title="LiveR",
        version=release(),
        summary="Keeps large training jobs alive on spot capacity.",
        description="Bearer tokens everywhere but /healthz. Errors are problem+json and name the field and the rule.",
        # The API description needs a token like everything else, and FastAPI's own pages load scripts from other hosts.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(context, manager or ServiceManager(), owned=owned),
        generate_unique_id_function=_operation_id,
        openapi_tags=[
            {"name": "jobs"}, {"name": "nodes"}, {"name": "notices"}, {"name": "handoffs"}, {"name": "ledger"},
            {"name": "leases"}, {"name": "capacity"}, {"name": "pools"},
            {"name": "tokens", "description": "Only for admins."}, {"name": "session"}, {"name": "fleet"},
            {"name": "incidents"}, {"name": "what-if"}, {"name": "events"}, {"name": "audit"},
            {"name": "agents", "description": "Only for agents' tokens."}, {"name": "health"},
        ],
    )  # fmt: skip
    app.state.context = context
    app.state.feed = Feed(context)
    app.state.replays = Replays(settings.what_ifs_max, settings.what_if_within_s)
    app.state.google_keys = GoogleKeys(settings.gcp_certs_url)
    app.add_middleware(Shortcut, answers={sync.SHORT: sync.sync}, handlers=app.exception_handlers)  # The innermost.
    app.add_middleware(Gate, context=context, body_bytes_max=BODY_BYTES_MAX)
    problems.install(app)
    app.router.routes.extend(_routes())
    _add_health(app, context)
    _add_description(app)
    # The last one: it answers every address that belongs to nobody else.
    app.include_router(console.router, include_in_schema=False)
    return app


@cache
def _routes() -> tuple[BaseRoute, ...]:
    """Of all nouns, in the order in which they are tried: nearly all requests come from agents. Made once a process: an
    application that includes routers by itself works out the parameters of all their routes."""
    nouns = (
        sync, jobs, peer_keys, decisions, metrics, nodes, notices, clouds, handoffs, ledger, leases, capacity, tokens,
        audit, fleet, incidents, outlook, timeline, events, what_if, wires,
    )  # fmt: skip
    others = (leases.leases, clouds.numbers, incidents.of_handoffs, push.router, tokens.joining, sessions.router)
    whole = APIRouter(generate_unique_id_function=_operation_id)
    for router in (*(noun.router for noun in nouns), *others):
        whole.include_router(router)
    return tuple(whole.routes)


def _operation_id(route: APIRoute) -> str:
    return route.name


def _lifespan(context: Context, manager: ServiceManager, *, owned: bool):
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.hub.start()
        if isinstance(context.clock, DatabaseClock):
            context.clock.start()
        reconcilers = Reconcilers(context) if context.settings.reconcilers else None
        hearing = AccountChannels(context) if reconcilers is not None else None
        app.state.running = Running(context, reconcilers, hearing)
        if reconcilers is not None and hearing is not None:
            reconcilers.start()
            hearing.start()
        tasks = [asyncio.create_task(_show_life(manager, reconcilers))]
        if reconcilers is not None:
            tasks.append(asyncio.create_task(_beat(context)))
        manager.ready(f"liver {release()} serves")
        try:
            yield
        finally:
            manager.stopping("agents go on by themselves")
            for task in tasks:
                task.cancel()
            if reconcilers is not None and hearing is not None:
                await run_in_threadpool(hearing.stop)
                await run_in_threadpool(reconcilers.stop)
            await run_in_threadpool(context.hub.stop)
            if isinstance(context.clock, DatabaseClock):
                await run_in_threadpool(context.clock.stop)
            if owned:
                await run_in_threadpool(context.database.close)

    return lifespan


async def _beat(context: Context) -> None:
    """While the event loop stands, no agent can report."""
    while True:
        context.listening.beat(context.clock())
        await asyncio.sleep(BEAT_S)


async def _show_life(manager: ServiceManager, reconcilers: Reconcilers | None) -> None:
    """Sign of life for the service manager, for as long as this loop answers requests and the reconcilers turn."""
    while manager.ping_s:
        stuck = "" if reconcilers is None else reconcilers.stuck()
        if stuck:
            _log.error("%s: the service manager may restart this service", stuck)
        else:
            manager.alive()
        await asyncio.sleep(manager.ping_s)


def _write_first_tokens(context: Context) -> None:
    data_dir = context.settings.resolved_data_dir()
    check_data_dir(data_dir)
    with context.sessions.begin() as session:
        # Replicas that start together must not each make first tokens.
        session.execute(text("LOCK TABLE tokens IN EXCLUSIVE MODE"))
        ensure_first_tokens(session, folder=data_dir / "tokens", now=context.clock())


def _add_health(app: FastAPI, context: Context) -> None:
    @app.get("/healthz", operation_id="healthz", tags=["health"], summary="Whether the process answers")
    def healthz() -> Health:
        return Health(status="ok", version=release())

    @app.get(
        "/readyz",
        operation_id="readyz",
        tags=["health"],
        summary="Whether database and reconcilers work, and changes can be stored",
        responses={503: {"model": Health}},
    )
    def readyz(response: Response) -> Health:
        detail = _why_not_ready(app, context)
        if detail:
            response.status_code = 503
            return Health(status="unavailable", version=release(), detail=detail)
        running: Running = app.state.running
        doubts = [_without_orders(context)]
        if running.reconcilers is not None:
            doubts += running.reconcilers.doubts()
        if running.hearing is not None:
            doubts += running.hearing.doubts()
        return Health(status="ok", version=release(), detail="; ".join(filter(None, doubts)))


def _without_orders(context: Context) -> str:
    """Anybody may ask: what is wrong with which job stands in the job's reason and in the log."""
    with context.sessions() as session:
        jobs_without = count_without_orders(session)
    return f"{jobs_without} jobs get no orders, see `liver jobs list`" if jobs_without else ""


def _add_description(app: FastAPI) -> None:
    description = cache(
        lambda: describe(
            app,
            {"sync": SyncReport, "submit_job": JobFile, "update_job": JobChange, "what_if": WhatIfAsk},
            EVENTS,
        )
    )
    app.openapi = description

    @app.get("/api/v1/openapi.json", include_in_schema=False, dependencies=[PERSON_ONLY])
    def show() -> JSONResponse:
        return JSONResponse(description())


def _why_not_ready(app: FastAPI, context: Context) -> str:
    try:
        with context.sessions() as session:
            session.execute(text("SELECT 1"))
        trouble = context.writing.trouble()
        context.database.outage.ends()
    except SQLAlchemyError as error:
        context.database.outage.begins(error)
        embedded = context.database.embedded
        return (embedded.trouble if embedded else "") or "the database does not answer"
    if trouble:
        return trouble
    running: Running | None = getattr(app.state, "running", None)
    if running is None or (running.reconcilers is not None and not running.reconcilers.alive()):
        return "a reconciler has ended"
    return ""
