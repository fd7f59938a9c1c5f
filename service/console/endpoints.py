"""The status page: jobs, layouts, handoffs, goodput by cause, dollars. A browser logs in with a token once."""

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, select_autoescape
from sqlalchemy import select
from sqlalchemy.orm import Session

from liver_core.layout.limits import JobId
from service.console.reference import components, operations_by_tag
from service.context import Context, ContextOf
from service.elapsed import ago, departure
from service.handoffs.queries import list_handoffs
from service.handoffs.schemas import HandoffOut
from service.jobs import queries
from service.jobs.causes import in_words
from service.jobs.schemas import GenerationOut, JobSummary
from service.jobs.tables import JobRow
from service.ledger.endpoints import LedgerOut
from service.ledger.queries import egress, summary
from service.nodes.endpoints import describe
from service.nodes.queries import list_nodes
from service.paging import Pages, paged
from service.tokens import sessions
from service.tokens.operations import is_valid, verify_token
from service.tokens.tables import PEOPLE, TokenRow

router = APIRouter()
FOLDER = Path(__file__).parent
FORM_BYTES_MAX = 4_096
JOBS_SHOWN = 20
HANDOFFS_SHOWN = 30
NODES_SHOWN = 200
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self' data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_templates = Environment(loader=FileSystemLoader(FOLDER / "templates"), autoescape=select_autoescape())


@router.get("/")
async def index(
    request: Request, context: ContextOf, pages: Annotated[Pages, paged(JOBS_SHOWN, JOBS_SHOWN)]
) -> Response:
    """All jobs at a glance, page by page."""
    return await context.people.run(_index, request, context, pages)


def _index(request: Request, context: Context, pages: Pages) -> Response:
    if not _is_logged_in(request, context):
        return _page("login.html", wrong=False)
    further: list[str] = []
    with context.people.sessions() as session:
        overview = _overview(context, session, replace(pages, announce=further.append))
    return _page("index.html", **overview, is_first=pages.cursor is None, further=next(iter(further), None))


@router.get("/jobs/{job_id}")
async def job(request: Request, context: ContextOf, job_id: JobId) -> Response:
    """One job."""
    return await context.people.run(_show_job, request, context, job_id)


def _show_job(request: Request, context: Context, job_id: str) -> Response:
    if not _is_logged_in(request, context):
        return _page("login.html", wrong=False)
    with context.people.sessions() as session:
        row = session.get(JobRow, job_id)
        if row is None:
            return _page("missing.html", status=404, job_id=job_id)
        return _page("job.html", **_job(context, session, row))


@router.get("/docs")
async def docs(request: Request, context: ContextOf) -> Response:
    """The API, for people: made of its description, without any script."""
    return await context.people.run(_docs, request, context)


def _docs(request: Request, context: Context) -> Response:
    if not _is_logged_in(request, context):
        return _page("login.html", wrong=False)
    described = request.app.openapi()
    info, tags = described["info"], operations_by_tag(described)
    return _page(
        "docs.html",
        title=info["title"],
        about=info["description"],
        release=info["version"],
        tags=tags,
        parts=components(described),
    )


@router.post("/login")
async def login(request: Request, context: ContextOf) -> Response:
    """Exchange a token for a session cookie. The token itself is not kept in the browser."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES_MAX:
            return _page("login.html", status=413, wrong=True)
    token = parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip()
    token_id = await context.people.run(_token_id, context, token)
    if token_id is None:
        return _page("login.html", status=401, wrong=True)
    expires = int(context.clock().timestamp() + context.settings.session_s)
    session = sessions.BrowserSession(token_id, secrets.token_hex(8), expires)
    answer = RedirectResponse("/", status_code=303, headers=_HEADERS)
    answer.set_cookie(
        sessions.COOKIE,
        sessions.sign(session, key=context.session_key),
        max_age=int(context.settings.session_s),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post("/logout")
async def logout(request: Request, context: ContextOf) -> Response:
    """End the session: this browser forgets it, and a copy of its cookie is of no more use."""
    found = _session(request, context)
    if found is not None:
        context.ended.add(found, now_unix_s=context.clock().timestamp())
    answer = RedirectResponse("/", status_code=303, headers=_HEADERS)
    answer.delete_cookie(sessions.COOKIE, httponly=True, samesite="strict")
    return answer


@router.get("/static/console.css")
def style() -> Response:
    """The one style sheet."""
    return FileResponse(FOLDER / "static" / "console.css", media_type="text/css")


def _token_id(context: Context, token: str) -> str | None:
    with context.people.sessions() as session:
        caller = verify_token(session, token, now=context.clock())
    return caller.token_id if caller is not None and caller.role in PEOPLE else None


def _session(request: Request, context: Context) -> sessions.BrowserSession | None:
    cookie = request.cookies.get(sessions.COOKIE, "")
    return sessions.read(cookie, now_unix_s=context.clock().timestamp(), key=context.session_key)


def _is_logged_in(request: Request, context: Context) -> bool:
    found = _session(request, context)
    if found is None or found in context.ended:
        return False
    with context.people.sessions() as session:
        row = session.scalars(select(TokenRow).where(TokenRow.token_id == found.token_id)).one_or_none()
    return row is not None and is_valid(row, context.clock())


def _overview(context: Context, session: Session, pages: Pages) -> dict[str, Any]:
    jobs = queries.list_jobs(session, pages)
    active = queries.active_rows(session, jobs)
    return {
        "now": context.clock(),
        "jobs": [JobSummary.of(row, active.get(row.job_id)) for row in jobs],
        "nodes": describe(context, session, list_nodes(session, Pages(NODES_SHOWN))),
        "handoffs": [HandoffOut.of(row) for row in list_handoffs(session, Pages(HANDOFFS_SHOWN))],
        "ledger": LedgerOut.of(None, list(summary(session)), egress(session)),
    }


def _job(context: Context, session: Session, row: JobRow) -> dict[str, Any]:
    steps = queries.list_steps(session, Pages(400), row.job_id, after=max(0, row.last_step - 200))
    active = queries.active_row(session, row)
    return {
        "now": context.clock(),
        "job": JobSummary.of(row, active),
        "generations": [
            GenerationOut.of(item) for item in queries.list_generations(session, Pages(HANDOFFS_SHOWN), row.job_id)
        ],
        "handoffs": [HandoffOut.of(item) for item in list_handoffs(session, Pages(HANDOFFS_SHOWN), job_id=row.job_id)],
        "ledger": LedgerOut.of(
            row.job_id, list(summary(session, job_id=row.job_id)), egress(session, job_id=row.job_id)
        ),
        "step_seconds": queries.step_seconds(session, row.job_id),
        "loss": next((step.loss for step in reversed(steps) if step.loss is not None), None),
        "plans": row.standing_plans,
    }


def _page(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(_templates.get_template(template).render(**values), status_code=status, headers=_HEADERS)


def _bytes(value: int | None) -> str:
    if value is None:
        return "–"
    size, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


_templates.filters.update(
    ago=ago, departure=departure, bytes=_bytes, seconds=_seconds, cause=lambda c: in_words(c.as_json())
)
