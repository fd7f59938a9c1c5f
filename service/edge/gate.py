"""Every request passes here first. What has no token, asks too often or is too large is refused before its body is
read; a body that does not come in time, and an error that nobody expected, become problem+json too. People's reads that
are admitted wait here for their turn, so that agents are served first.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic

from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent.protocol import errors
from agent.protocol.errors import Problem
from service.context import CALLER, TURN, Context, find_caller, find_visitor
from service.edge.budgets import Buckets, Shown
from service.edge.credentials import SESSION_PATH, bearer_of, check_origin, cookie_of, reason_of
from service.edge.safe_headers import safe_headers
from service.problems import ProblemError, response_to, response_to_database, too_many, unexpected
from service.tokens.operations import Caller
from service.tokens.tables import PEOPLE

BODY_BYTES_MAX = 64 * 1024
"""Of a route that names no limit of its own."""
BODY_S_MAX = 30.0
_OF_AGENTS = "/agent/"
_OF_PEOPLE = "/api/"
_NEEDS_TOKEN = (_OF_PEOPLE, _OF_AGENTS)
_LOGIN = ("POST", SESSION_PATH)
_CLOSE = {"Connection": "close"}
_log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware. `body_bytes_max`: by path, where the usual limit does not fit."""

    def __init__(self, app: ASGIApp, *, context: Context, body_bytes_max: Mapping[str, int]) -> None:
        self._app = app
        self._context = context
        self._body_bytes_max = body_bytes_max
        settings = context.settings
        self._agents = Buckets(per_s=settings.agent_requests_per_s, burst=2 * settings.agent_requests_per_s)
        self._others = Buckets(per_s=settings.requests_per_s, burst=2 * settings.requests_per_s)
        self._shown_to = {path: Shown() for path in _NEEDS_TOKEN}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. The lifespan passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _safe(scope, send)
        try:
            body = _Body(receive, self._body_bytes_max.get(scope["path"], BODY_BYTES_MAX))
            await self._admit(scope, body)
            end = await self._begin_turn(scope)
        except ProblemError as error:
            await response_to(error, _closing(scope))(scope, receive, send)
            return
        except SQLAlchemyError as error:
            refused = response_to_database(error, self._context.database.outage)
            refused.headers.update(_CLOSE)
            await refused(scope, receive, send)
            return
        if end is None:
            await self._answer(scope, body.receive, send)
        else:
            await self._answer_in_turn(scope, body.receive, send, end)

    async def _begin_turn(self, scope: Scope) -> Callable[[], None] | None:
        """What ends the turn of a person's read; others need none. Raises 429 and 503."""
        caller = scope.get(CALLER)
        is_read = scope["method"] == "GET" and scope["path"].startswith(_OF_PEOPLE)
        if not is_read or caller is None or caller.role not in PEOPLE:
            return None
        scope[TURN] = await self._context.readers.begin(caller.token_id)
        return scope[TURN]

    async def _answer_in_turn(self, scope: Scope, receive: Receive, send: Send, end: Callable[[], None]) -> None:
        """The turn ends when the answer begins: a stream may go on for days."""

        async def begun(message: Message) -> None:
            end()
            await send(message)

        try:
            await self._answer(scope, receive, begun)
        finally:
            end()

    async def _admit(self, scope: Scope, body: "_Body") -> None:
        headers = Headers(scope=scope)
        _check_form(scope, headers)
        if scope["path"].startswith(_NEEDS_TOKEN) and (scope["method"], scope["path"]) != _LOGIN:
            try:
                await self._admit_caller(scope, headers)
            except (SQLAlchemyError, ProblemError) as error:
                if not isinstance(error, ProblemError) or error.problem.status in (429, 503):
                    self._note_try(bearer_of(headers))
                raise
        else:
            self._take(self._others, _address(scope))
        body.check_length(headers)

    async def _admit_caller(self, scope: Scope, headers: Headers) -> None:
        """Whoever shows what was not valid here before pays first, from the budget of the address: a token that nobody
        has costs a look-up too."""
        path, lane, of_address = _OF_PEOPLE, self._context.people, self._others
        if scope["path"].startswith(_OF_AGENTS):
            path, lane, of_address = _OF_AGENTS, self._context.agents, self._agents
        token, cookie = bearer_of(headers), cookie_of(scope) if path == _OF_PEOPLE else ""
        shown, secret = self._shown_to[path], f"cookie {cookie}" if cookie else f"bearer {token}"
        known = shown.caller_of(secret)
        if known is None:
            self._take(of_address, _address(scope))
        elif not self._budget_of(known).has_one(_name(known), now_s=monotonic()):
            self._take(self._budget_of(known), _name(known))
        try:
            caller = await (find_visitor(self._context, cookie) if cookie else find_caller(self._context, token, lane))
        except ProblemError as error:
            if error.problem.status == 401:
                shown.forget(secret)
            raise
        shown.note(secret, caller)
        if cookie:
            check_origin(scope)
        scope[CALLER] = replace(caller, why=reason_of(headers)) if path == _OF_PEOPLE else caller
        self._take(self._budget_of(caller), _name(caller))

    def _note_try(self, token: str) -> None:
        """It is no fault of the node whose token this is, that its report is not read."""
        node_id = self._context.recent_nodes.node_of(token)
        if node_id is not None:
            self._context.listening.tried(node_id, self._context.clock())

    def _budget_of(self, caller: Caller) -> Buckets:
        return self._others if caller.role in PEOPLE else self._agents

    def _take(self, budget: Buckets, whose: str) -> None:
        """Raises 429."""
        wait_s = budget.wait_s(whose, now_s=monotonic())
        if wait_s > 0.0:
            detail = f"more requests than this service takes from one caller; try again in {math.ceil(wait_s)} s"
            raise too_many(detail, wait_s=wait_s)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whatever happens inside becomes an answer, and what nobody expected is logged under an id."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            _log.debug("%s %s: the client has gone before its body came", scope["method"], scope["path"])
        except Exception:
            problem_id = secrets.token_hex(6)
            _log.exception("problem %s: %s %s failed", problem_id, scope["method"], scope["path"])
            if has_begun:
                raise
            await response_to(unexpected(problem_id), _CLOSE)(scope, receive, send)


class _Body:
    """Passes a request's body on, up to a size and a time."""

    def __init__(self, receive: Receive, bytes_max: int) -> None:
        self._receive = receive
        self._bytes_max = bytes_max
        self._bytes = 0
        self._is_whole = False
        self._ends_at = math.inf

    def check_length(self, headers: Headers) -> None:
        """Raises 413 for a body whose length is announced and too large."""
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > self._bytes_max:
            raise ProblemError(self._too_large(), headers=_CLOSE)

    async def receive(self) -> Message:
        """The next message. Raises 413 and 408 as FastAPI lets them pass."""
        if self._is_whole:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        self._ends_at = min(self._ends_at, now + BODY_S_MAX)
        try:
            async with asyncio.timeout_at(self._ends_at):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {BODY_S_MAX:.0f} s", _CLOSE) from None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._bytes_max:
            raise HTTPException(413, self._too_large().detail, _CLOSE)
        self._is_whole = not message.get("more_body", False)
        return message

    def _too_large(self) -> Problem:
        detail = f"a request to this address may have at most {self._bytes_max} bytes"
        return Problem(title="Too large", status=413, code=errors.TOO_LARGE, detail=detail)


def _safe(scope: Scope, send: Send) -> Send:
    """Sends answers with the headers that all of them have."""

    async def begun(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(safe_headers(scope))
        await send(message)

    return begun


def _name(caller: Caller) -> str:
    return f"token {caller.token_id}"


def _address(scope: Scope) -> str:
    return f"address {(scope.get('client') or ('',))[0]}"


def _closing(scope: Scope) -> Mapping[str, str]:
    """Where a body is not read, nothing else may follow on its connection."""
    headers = Headers(scope=scope)
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return _CLOSE if has_body else {}


def _check_form(scope: Scope, headers: Headers) -> None:
    """Two lengths for one body mean two requests to whoever reads them differently; so do several hosts, and an unknown
    version."""
    if "transfer-encoding" in headers and "content-length" in headers:
        detail = "Content-Length and Transfer-Encoding may not come together"
    elif scope["http_version"] == "1.1" and len(headers.getlist("host")) != 1:
        detail = "a request has one Host header"
    elif scope["http_version"] not in ("1.0", "1.1", "2"):
        detail = f"HTTP/{scope['http_version']} is not spoken here; use HTTP/1.1"
    else:
        return
    raise ProblemError(Problem(title="Bad request", status=400, code=errors.INVALID, detail=detail), headers=_CLOSE)
