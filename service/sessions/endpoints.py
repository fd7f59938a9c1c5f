"""REST of browser sessions: log in with a token, see who one is, log out."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from agent.protocol import errors
from agent.protocol.errors import Problem
from service.audit.operations import note
from service.context import PERSON_ONLY, CallerOf, Context, ContextOf, SessionOf
from service.edge.credentials import SESSION_PATH, cookie_of
from service.edge.routes import PeoplesRoute
from service.problems import ProblemError
from service.sessions.operations import COOKIE, begin_session, end_session
from service.tokens.operations import TOKEN_CHARS_MAX, Caller, verify_token
from service.tokens.tables import PEOPLE, Role

router = APIRouter(tags=["session"], route_class=PeoplesRoute)


class Login(BaseModel):
    """What somebody logs in with."""

    model_config = ConfigDict(strict=True, extra="forbid")

    token: Annotated[str, Field(min_length=1, max_length=TOKEN_CHARS_MAX, description="Of a person or a script.")]


class SessionOut(BaseModel):
    """Who the caller is."""

    token_id: str
    name: str
    role: Role
    session_expires_at: datetime | None = Field(description="When a new login is needed; null without a cookie.")


@router.post(SESSION_PATH, status_code=201, operation_id="begin_session", summary="Log in with a token")
async def begin(request: Request, context: ContextOf, wanted: Login, response: Response) -> SessionOut:
    """Sets a cookie that stands for the token, which works wherever the token does, and ends with it. A request that
    changes something also needs the header `Liver-Console: 1` with it."""
    found = await context.people.run(_begin, context, wanted.token.strip())
    if found is None:
        detail = "this token is unknown, expired or revoked"
        raise ProblemError(Problem(title="Not authenticated", status=401, code=errors.UNAUTHENTICATED, detail=detail))
    caller, secret, expires_at = found
    response.headers["Cache-Control"] = "no-store"
    response.set_cookie(
        COOKIE,
        secret,
        max_age=max(0, int((expires_at - context.clock()).total_seconds())),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return _shown(caller, expires_at)


def _begin(context: Context, token: str) -> tuple[Caller, str, datetime] | None:
    now = context.clock()
    with context.people.sessions.begin() as session:
        caller = verify_token(session, token, now=now)
        if caller is None:
            return None
        if caller.role not in PEOPLE:
            detail = f"a token of role {caller.role} is for agents; log in with one of {', '.join(PEOPLE)}"
            raise ProblemError(Problem(title="Forbidden", status=403, code=errors.FORBIDDEN, detail=detail))
        secret, expires_at = begin_session(session, caller, lasts_s=context.settings.session_s, now=now)
        note(session, caller, "begin_session", caller.token_id, now=now)
    return caller, secret, expires_at


@router.get(SESSION_PATH, operation_id="show_session", summary="Who the caller is", dependencies=[PERSON_ONLY])
async def show(request: Request, caller: CallerOf) -> SessionOut:
    """By its cookie or its token."""
    return _shown(caller, caller.expires_at if cookie_of(request.scope) else None)


@router.delete(SESSION_PATH, status_code=204, operation_id="end_session", summary="Log out", dependencies=[PERSON_ONLY])
def end(request: Request, context: ContextOf, session: SessionOf, caller: CallerOf, response: Response) -> None:
    """The cookie, and any copy of it, is of no more use. Without a cookie nothing changes."""
    if secret := cookie_of(request.scope):
        end_session(session, secret)
        note(session, caller, "end_session", caller.token_id, now=context.clock())
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


def _shown(caller: Caller, expires_at: datetime | None) -> SessionOut:
    return SessionOut(token_id=caller.token_id, name=caller.name, role=caller.role, session_expires_at=expires_at)
