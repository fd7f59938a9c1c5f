"""Serves the console: the one page behind all of its addresses, its files, and the API's description for people."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.convertors import StringConvertor, register_url_convertor

from service.console.app_files import AppFile, AppFiles
from service.console.reference import components, operations_by_tag
from service.context import ContextOf, find_visitor
from service.edge.credentials import cookie_of
from service.edge.tags import is_known
from service.problems import ProblemError, not_found

router = APIRouter()
FOLDER = Path(__file__).parent
APP_FOLDER = FOLDER / "static" / "app"
FOREVER = "public, max-age=31536000, immutable"
_SAFE = {
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_APP = {
    **_SAFE,
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; worker-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}
_PLAIN = {
    **_SAFE,
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
}
_templates = Environment(loader=FileSystemLoader(FOLDER / "templates"), autoescape=select_autoescape())
_app = AppFiles(APP_FOLDER)


class _Page(StringConvertor):
    """Addresses of the console's pages: what neither belongs to others nor looks like a file. Jobs' names have dots."""

    regex = r"(?!(?:api|agent|assets|static)(?:/|$))(?:[^./]*|[^./]+/.*)"


class _File(StringConvertor):
    """Files beside the page and among its assets."""

    regex = r"(?:assets/)?[A-Za-z0-9_-][A-Za-z0-9_.-]*\.[A-Za-z0-9]+"


register_url_convertor("consolepage", _Page())
register_url_convertor("consolefile", _File())


@router.get("/docs")
async def docs(request: Request, context: ContextOf) -> Response:
    """The API, for people: made of its description, without any script."""
    try:
        await find_visitor(context, cookie_of(request.scope))
    except ProblemError as error:
        if error.problem.status != 401:
            raise
        return RedirectResponse("/login?next=/docs", status_code=303, headers=_PLAIN)
    return await context.people.compute(_docs, request)


def _docs(request: Request) -> Response:
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


@router.get("/static/console.css")
def style() -> Response:
    """The style sheet of the pages without scripts."""
    return FileResponse(FOLDER / "static" / "console.css", media_type="text/css", headers=_SAFE)


@router.api_route("/{name:consolefile}", methods=["GET", "HEAD"])
def file(request: Request, name: str) -> Response:
    """A file of the build."""
    found = _app.find(name)
    if found is None or name == "index.html":
        raise not_found("file", name)
    return _answer(request, found)


@router.api_route("/{path:consolepage}", methods=["GET", "HEAD"])
def page(request: Request, path: str) -> Response:
    """The console. Which of its pages, the browser finds out; everything that one shows needs a login."""
    found = _app.index()
    return _page("unbuilt.html") if found is None else _answer(request, found)


def _answer(request: Request, found: AppFile) -> Response:
    headers = {
        **_APP,
        "ETag": f'"{found.tag}"',
        "Cache-Control": FOREVER if found.forever else "no-cache",
        "Vary": "Accept-Encoding",
    }
    if is_known(headers["ETag"], request.headers.get("if-none-match")):
        return Response(status_code=304, headers=headers)
    content = found.content
    if found.zipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["Content-Encoding"] = found.zipped, "gzip"
    return Response(content, media_type=found.media_type, headers=headers)


def _page(template: str, **values: Any) -> HTMLResponse:
    return HTMLResponse(_templates.get_template(template).render(**values), headers=_PLAIN)
