"""Errors as problem+json: an error that a user causes gets a status, a sentence, and the field with its broken rule."""

import logging
import math
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from agent.protocol import errors
from agent.protocol.errors import PROBLEM_MEDIA_TYPE, FieldProblem, Problem
from agent.protocol.plain_rules import rule_in_words
from liver_core.layout.limits import fitting
from service.db.outage import Outage, is_outage

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "2"}}
_CODES = {404: errors.NOT_FOUND, 408: errors.TOO_LATE, 413: errors.TOO_LARGE}
_PASSING = (OperationalError, InterfaceError, PoolTimeoutError)
"""Errors of the database that the next try may not meet. Others are mistakes of the service: 500, with an id."""
PROBLEMS_MAX = 256
FIELD_CHARS_MAX = 500
_log = logging.getLogger(__name__)


class ProblemError(Exception):
    """Raised anywhere in an operation; becomes the response."""

    def __init__(self, problem: Problem, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.headers = headers or {}


def not_found(what: str, key: object) -> ProblemError:
    """404 naming the thing."""
    return ProblemError(
        Problem(title="Not found", status=404, code=errors.NOT_FOUND, detail=f"there is no {what} {str(key)!r}")
    )


def invalid(*problems: FieldProblem) -> ProblemError:
    """422 naming each field and rule."""
    return ProblemError(
        Problem(
            title="Invalid request",
            status=422,
            code=errors.INVALID,
            detail="; ".join(f"{problem.field}: {problem.rule}" for problem in problems),
            errors=problems,
        )
    )


def conflict(detail: str) -> ProblemError:
    """409 for a state that does not allow the request."""
    return ProblemError(Problem(title="Conflict", status=409, code=errors.CONFLICT, detail=detail))


def unauthenticated(detail: str) -> ProblemError:
    """401 for a caller that is not known, or no longer."""
    return ProblemError(Problem(title="Not authenticated", status=401, code=errors.UNAUTHENTICATED, detail=detail))


def unavailable(detail: str) -> Problem:
    """503: nothing was changed, and the same request may succeed in a moment."""
    return Problem(title="Unavailable", status=503, code=errors.UNAVAILABLE, detail=detail)


def too_many(detail: str, *, wait_s: float) -> ProblemError:
    """429 for who asks for more than the share of one caller, and may again after so long."""
    problem = Problem(title="Too many requests", status=429, code=errors.TOO_MANY, detail=detail)
    return ProblemError(problem, headers={"Retry-After": str(math.ceil(wait_s))})


def unknown() -> Problem:
    """503 where the database was lost while it stored a change."""
    return unavailable(
        "the database was lost while it stored this: whether anything was changed is not known; a request with an "
        "Idempotency-Key may be sent again as it is"
    )


def unexpected(problem_id: str) -> ProblemError:
    """500 with the id that the service's log gives to the error."""
    detail = f"an error in the service, which its log names {problem_id}; whether anything was changed is not known"
    return ProblemError(Problem(title="Unexpected error", status=500, code=errors.UNEXPECTED, detail=detail))


def field_problems(error: ValidationError | RequestValidationError) -> tuple[FieldProblem, ...]:
    """Pydantic's findings as dotted fields and rules, without the input itself (it may contain a secret)."""
    found = []
    for item in error.errors()[:PROBLEMS_MAX]:
        location = [str(part) for part in item["loc"] if part not in ("body", "query", "path", "header")]
        field = fitting(".".join(location), FIELD_CHARS_MAX)
        found.append(FieldProblem(field=field or "(whole)", rule=rule_in_words(item)))
    return tuple(found)


def response(problem: Problem, *, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The HTTP form of a problem."""
    return JSONResponse(
        jsonable_encoder(problem), status_code=problem.status, media_type=PROBLEM_MEDIA_TYPE, headers=headers
    )


def response_to(error: ProblemError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer that an error becomes."""
    usual = _HEADERS.get(error.problem.status, {})
    return response(error.problem, headers={**usual, **error.headers, **(headers or {})})


def install(app: FastAPI) -> None:
    """Make every error of the app problem+json."""

    @app.exception_handler(ProblemError)
    async def _ours(_request: Request, error: ProblemError) -> JSONResponse:
        return response_to(error)

    @app.exception_handler(RequestValidationError)
    async def _request(_request: Request, error: RequestValidationError) -> JSONResponse:
        if any(item["loc"] == ("body",) and isinstance(item.get("input"), bytes) for item in error.errors()):
            # A body is read as JSON only where its type says that it is.
            wrong = FieldProblem(field="Content-Type", rule="must be application/json for a request with a body")
            return response(invalid(wrong).problem)
        return response(invalid(*field_problems(error)).problem)

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:
            # FastAPI's own, for a body that is no text.
            return response_to(invalid(FieldProblem(field="(whole)", rule="must be JSON")))
        code = _CODES.get(error.status_code, errors.INVALID)
        problem = Problem(title=str(error.detail), status=error.status_code, code=code, detail=str(error.detail))
        return response(problem, headers=dict(error.headers) if error.headers else None)

    @app.exception_handler(SQLAlchemyError)
    async def _database(request: Request, error: SQLAlchemyError) -> JSONResponse:
        return response_to_database(error, request.app.state.context.database.outage)


def response_to_database(error: SQLAlchemyError, outage: Outage) -> JSONResponse:
    """503 where the next try may not meet this error. Raises it again where it is a mistake of the service."""
    if is_outage(error):
        outage.begins(error)
    elif isinstance(error, _PASSING):
        _log.error("the database did not answer in time: %s", error)
    else:
        raise error
    problem = unavailable("the database did not answer in time; nothing was changed, try again")
    return response(problem, headers=_HEADERS[503])
