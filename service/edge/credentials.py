"""With what a request comes: a bearer token, or the cookie of a browser session. Who that is, is looked up elsewhere.

A browser sends the cookie by itself, also where another site made it ask. So a change that comes with a cookie needs a
header that no other site can have a browser send, and must not come from one.
"""

from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope

from agent.protocol import errors
from agent.protocol.errors import FieldProblem, Problem
from service.problems import ProblemError, invalid
from service.sessions.operations import COOKIE

SESSION_PATH = "/api/v1/session"
CONSOLE = "Liver-Console"
REASON = "Liver-Reason"
REASON_CHARS_MAX = 500
_READS = ("GET", "HEAD", "OPTIONS")
_HEADER_CHARS_MAX = 9 * REASON_CHARS_MAX


def bearer_of(headers: Headers) -> str:
    """The token, empty if there is none."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def cookie_of(scope: Scope) -> str:
    """The content of the session's cookie, empty if there is none, or if a token comes too: that counts."""
    headers = Headers(scope=scope)
    if headers.get("authorization"):
        return ""
    return cookie_parser(headers.get("cookie", "")).get(COOKIE, "")


def check_origin(scope: Scope) -> None:
    """Raises 403 for a change that another site may have had the browser ask for."""
    headers = Headers(scope=scope)
    if scope["method"] in _READS:
        return
    if headers.get(CONSOLE) != "1" or headers.get("sec-fetch-site", "same-origin") != "same-origin":
        detail = f"a change that comes with a cookie needs the header {CONSOLE}: 1, and must come from the console"
        raise ProblemError(Problem(title="Forbidden", status=403, code=errors.FORBIDDEN, detail=detail))


def reason_of(headers: Headers) -> str:
    """Why the caller asks for it, as it says; empty if it does not say. Raises 422."""
    written = headers.get(REASON, "")
    try:
        if len(written) > _HEADER_CHARS_MAX:
            raise ValueError
        found = unquote_to_bytes(written.encode("latin-1")).decode()
    except ValueError:
        found = "\0"
    if len(found) > REASON_CHARS_MAX or not found.isprintable():
        rule = f"must be at most {REASON_CHARS_MAX} printable characters, percent-encoded UTF-8"
        raise invalid(FieldProblem(field=REASON, rule=rule))
    return found.strip()
