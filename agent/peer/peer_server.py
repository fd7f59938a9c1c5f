"""The peer endpoint of one agent: checks signature and format of an envelope and passes it to the driver.

Every answer is small: an agent sends what its peers should know as messages of its own.
"""

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from agent.peer.signing import (
    JOB_HEADER,
    NONCE_HEADER,
    ReplayWindow,
    SignatureRefused,
    SignatureStale,
    tell_time,
)
from agent.peer.signing import Request as SignedRequest
from agent.protocol import PROTOCOL_VERSION
from agent.protocol.errors import (
    FORBIDDEN,
    INVALID,
    NOT_FOUND,
    PROBLEM_MEDIA_TYPE,
    TOO_LARGE,
    UNAUTHENTICATED,
    FieldProblem,
    Problem,
    version_problem,
)
from agent.protocol.peer import ENVELOPE_BYTES_MAX, PEER_PATH, Envelope
from liver_core.steady_clock import Clock

STATUS_PATH = "/peer/v1/status"
MAX_CONNECTIONS = 4_096


class PeerRefused(Exception):
    """The driver rejects an envelope; the text is sent back to the sender."""


KeysOf = Callable[[str], Sequence[str]]
Take = Callable[[Envelope], Awaitable[None]]
Status = Callable[[str], dict[str, Any]]


def peer_app(*, node_id: str, keys_of: KeysOf, take: Take, status: Status, now: Clock) -> FastAPI:
    """`keys_of(job_id)`: the job's keys that are valid, none for a job that this node does not take part in."""
    app = FastAPI(title="liver peer endpoint", openapi_url=None, docs_url=None, redoc_url=None)
    window = ReplayWindow()

    async def answer(request: Request, body: bytes, make: Callable[[str], Awaitable[Response]]) -> Response:
        """What `make` answers to the job's members, and what the time is here."""
        job_id = request.headers.get(JOB_HEADER, "")
        signed, here = SignedRequest(request.method, request.url.path, job_id, body), now()
        try:
            # A job without keys is answered like a wrong key: a caller without one learns nothing of this node's jobs.
            key = window.verify(signed, request.headers, keys_of(job_id), here)
        except SignatureStale as error:
            key, response = error.key, _problem(401, UNAUTHENTICATED, str(error))
        except SignatureRefused as error:
            return _problem(401, UNAUTHENTICATED, str(error))
        else:
            response = await make(job_id)
        response.headers.update(tell_time(signed, request.headers[NONCE_HEADER], key, now=here))
        return response

    @app.post(PEER_PATH)
    async def messages(request: Request) -> Response:
        body = await _read_body(request)
        if body is None:
            return _problem(413, TOO_LARGE, f"a message has at most {ENVELOPE_BYTES_MAX} bytes")
        return await answer(request, body, lambda job_id: taken(job_id, body))

    async def taken(job_id: str, body: bytes) -> Response:
        try:
            envelope = Envelope.model_validate_json(body)
        except ValidationError as error:
            # What another version sends may well be unreadable: then the version is what to say.
            version = _version_in(body)
            return _invalid(error) if version in (None, PROTOCOL_VERSION) else _other_version(version)
        if envelope.protocol_version != PROTOCOL_VERSION:
            return _other_version(envelope.protocol_version)
        if envelope.job_id != job_id or envelope.receiver != node_id:
            return _problem(403, FORBIDDEN, f"receiver must be {node_id} and job_id must be {job_id}, as signed")
        try:
            await take(envelope)
        except PeerRefused as error:
            return _problem(422, INVALID, str(error))
        return JSONResponse({"taken": True}, status_code=202)

    @app.get(STATUS_PATH)
    async def peer_status(request: Request) -> Response:
        async def said(job_id: str) -> Response:
            return JSONResponse(status(job_id))

        return await answer(request, b"", said)

    @app.get("/{path:path}")
    async def nothing(path: str) -> Response:
        return _problem(404, NOT_FOUND, f"there is no /{path[:200]} here")

    return app


def bind(host: str, port: int) -> socket.socket:
    """A socket on exactly this address. Raises OSError when the port is taken."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1_024)
    except OSError:
        listener.close()
        raise
    return listener


class PeerServer(uvicorn.Server):
    """Uvicorn without its signal handlers: the agent has its own."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_level="warning",
                access_log=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture nothing."""
        yield


async def _read_body(request: Request) -> bytes | None:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > ENVELOPE_BYTES_MAX:
            return None
    return bytes(body)


def _version_in(body: bytes) -> object:
    try:
        content = json.loads(body)
    except ValueError:
        return None
    return content.get("protocol_version") if isinstance(content, dict) else None


def _other_version(version: object) -> Response:
    problem = version_problem(version)
    return _problem(409, problem.code, problem.detail)


def _invalid(error: ValidationError) -> Response:
    errors = tuple(
        FieldProblem(field=".".join(map(str, item["loc"])) or "body", rule=item["msg"]) for item in error.errors()[:16]
    )
    return _problem(422, INVALID, f"{errors[0].field}: {errors[0].rule}", errors)


def _problem(status: int, code: str, detail: str, errors: tuple[FieldProblem, ...] = ()) -> Response:
    body = Problem(title=code, status=status, code=code, detail=detail, errors=errors)
    return Response(body.model_dump_json(), status_code=status, media_type=PROBLEM_MEDIA_TYPE)
