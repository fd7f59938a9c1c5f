"""What the routes for people share: a change that is sent twice under one Idempotency-Key is made once, and an answer
that the caller has already is not sent again.
"""

import hashlib
import re
from collections.abc import Callable, Coroutine
from typing import Any, get_origin

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from sqlalchemy.orm import Session

from agent.protocol.errors import FieldProblem
from service.context import ASK, CALLER, SESSION
from service.edge.tags import is_known, tag_of
from service.problems import invalid
from service.repeats.operations import AnsweredBefore, Ask, keep
from service.tokens.operations import Caller

KEY = "Idempotency-Key"
KEY_PATTERN = r"^[\x21-\x7e]{1,255}$"
REPLAYED = "Idempotency-Replayed"
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class PeoplesRoute(APIRoute):
    """A route for people and scripts."""

    def get_route_handler(self) -> Handler:
        """FastAPI's own, within which the request's transaction is still open."""
        handle = super().get_route_handler()
        if "POST" in (self.methods or ()):
            return _once(handle)
        return handle if get_origin(self.response_model) is list else _tagged(handle)


def _once(handle: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        key = request.headers.get(KEY)
        if key is None:
            return await handle(request)
        if not re.fullmatch(KEY_PATTERN, key):
            raise invalid(FieldProblem(field=KEY, rule="must be 1 to 255 characters of ASCII without spaces"))
        caller: Caller | None = request.scope.get(CALLER)
        if caller is None:
            return await handle(request)  # A login, which is never kept.
        ask = request.scope[ASK] = Ask(caller.token_id, _digest(key.encode()), await _digest_of(request))
        try:
            response = await handle(request)
        except AnsweredBefore as repeated:
            return Response(repeated.body, repeated.status, media_type="application/json", headers={REPLAYED: "true"})
        # What nobody may store is not stored here either.
        if response.headers.get("cache-control") != "no-store":
            session: Session = request.scope[SESSION]
            status, body = response.status_code, bytes(response.body)
            await run_in_threadpool(keep, session, ask, status=status, body=body)
        return response

    return answer


def _tagged(handle: Handler) -> Handler:
    """The reading of one thing, and not of a list or a stream. Where the route has set an ETag, of what people can
    change, that is its first part."""

    async def answer(request: Request) -> Response:
        response = await handle(request)
        is_whole = response.status_code == 200 and response.headers.get("content-type") == "application/json"
        if request.method != "GET" or not is_whole:
            return response
        tag = tag_of(bytes(response.body), response.headers.get("etag"))
        if is_known(tag, request.headers.get("if-none-match")):
            return Response(status_code=304, headers={"ETag": tag})
        response.headers["ETag"] = tag
        return response

    return answer


async def _digest_of(request: Request) -> str:
    kind = request.headers.get("content-type", "")
    parts = (request.method, request.url.path, request.url.query, kind)
    return _digest("\n".join(parts).encode() + b"\n" + await request.body())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
