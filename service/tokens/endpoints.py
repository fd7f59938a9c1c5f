"""REST of tokens for admins, and how an agent gets a token for its node."""

from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from agent.protocol import PROTOCOL_VERSION
from agent.protocol.errors import FieldProblem, version_problem
from agent.protocol.joining import JOIN_PATH, RENEW_PATH, JoinRequest, NodeToken
from liver_core.layout.limits import NodeId, ShortText
from service.audit.operations import note
from service.context import ADMIN_ONLY, AdminOf, Context, ContextOf, JoinerOf, NodeKeyOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.paging import PagesOf
from service.problems import ProblemError, invalid
from service.tokens.operations import (
    Caller,
    create_token,
    issue_node_token,
    join_node,
    list_tokens,
    revoke_token,
    rotate_token,
)
from service.tokens.tables import Role, TokenRow

router = APIRouter(prefix="/api/v1/tokens", tags=["tokens"], route_class=PeoplesRoute, dependencies=[ADMIN_ONLY])
joining = APIRouter(tags=["agents"])
TokenId = Annotated[str, Path(pattern="^[0-9a-f]{1,64}$")]
SECONDS_MAX = 10 * 366 * 86_400


class TokenIn(BaseModel):
    """A token to make."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"examples": [{"role": "join", "name": "rack 7", "uses": 1}]},
    )

    role: Literal[Role.VIEWER, Role.OPERATOR, Role.ADMIN, Role.JOIN]
    name: Annotated[ShortText, Field(min_length=1, description="Who or what it is for; it stands in the audit log.")]
    expires_in_s: float | None = Field(default=None, gt=0, le=SECONDS_MAX, description="Never, if absent.")
    uses: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Join tokens only: how many nodes it admits; 1 if absent."
    )
    node_id: NodeId | None = Field(default=None, description="Join tokens only: the only node it admits.")


class TokenOut(BaseModel):
    """A token without its secret."""

    token_id: str
    role: Role
    name: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    node_id: str | None
    uses_left: int | None
    created_by: str | None

    @classmethod
    def of(cls, row: TokenRow) -> "TokenOut":
        """From its row."""
        return cls.model_validate(row, from_attributes=True)


class NewToken(TokenOut):
    """A token that has just been made, with its secret, which is shown this once."""

    token: str


class Rotation(BaseModel):
    """How to rotate a token."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    grace_s: float = Field(default=0.0, ge=0, le=30 * 86_400, description="How long the old token still works.")


@router.get("", operation_id="list_tokens", summary="List tokens, newest first")
def list_all(
    session: SessionOf,
    pages: PagesOf,
    revoked: Annotated[bool, Query(description="Also those that were revoked.")] = False,
) -> list[TokenOut]:
    """Those that admins have made, and the keys of nodes. No secret is ever shown again."""
    return [TokenOut.of(row) for row in list_tokens(session, pages, revoked=revoked)]


@router.post("", status_code=201, operation_id="create_token", summary="Make a token")
def create(context: ContextOf, session: SessionOf, admin: AdminOf, wanted: TokenIn, response: Response) -> NewToken:
    """The answer is the only place where its secret stands: it is not kept for a repeat under an Idempotency-Key."""
    response.headers["Cache-Control"] = "no-store"
    is_join = wanted.role is Role.JOIN
    for name in ("uses", "node_id"):
        if not is_join and getattr(wanted, name) is not None:
            raise invalid(FieldProblem(field=name, rule="is for join tokens only"))
    now = context.clock()
    row, token = create_token(
        session,
        role=Role(wanted.role),
        name=wanted.name,
        now=now,
        expires_at=None if wanted.expires_in_s is None else now + timedelta(seconds=wanted.expires_in_s),
        uses_left=(wanted.uses or 1) if is_join else None,
        node_id=wanted.node_id,
        created_by=admin.token_id,
    )
    note(session, admin, "create_token", row.token_id, now=now, role=row.role, name=row.name)
    return NewToken(**TokenOut.of(row).model_dump(), token=token)


@router.post("/{token_id}/rotate", status_code=201, operation_id="rotate_token", summary="Replace a token")
def rotate(
    context: ContextOf, session: SessionOf, admin: AdminOf, token_id: TokenId, how: Rotation, response: Response
) -> NewToken:
    """A new one with the same role, name and limits. The old one works for `grace_s` more."""
    response.headers["Cache-Control"] = "no-store"
    now = context.clock()
    row, token = rotate_token(session, token_id, grace_s=how.grace_s, now=now, created_by=admin.token_id)
    note(session, admin, "rotate_token", token_id, now=now, replaced_by=row.token_id)
    return NewToken(**TokenOut.of(row).model_dump(), token=token)


@router.post("/{token_id}/revoke", operation_id="revoke_token", summary="Revoke a token")
def revoke(context: ContextOf, session: SessionOf, admin: AdminOf, token_id: TokenId) -> TokenOut:
    """It stops working at once. A node whose key it is counts as gone, and has no part in its jobs any more."""
    now = context.clock()
    row = revoke_token(session, token_id, now=now)
    note(session, admin, "revoke_token", token_id, now=now)
    return TokenOut.of(row)


@joining.post(JOIN_PATH, status_code=201, operation_id="join", summary="Make a node known")
async def join(context: ContextOf, caller: JoinerOf, wanted: JoinRequest, response: Response) -> NodeToken:
    """With a join token. The agent makes the node's key itself, so that this may be repeated."""
    if wanted.protocol_version != PROTOCOL_VERSION:
        raise ProblemError(version_problem(wanted.protocol_version))
    response.headers["Cache-Control"] = "no-store"
    return await context.agents.run(_join, context, caller, wanted)


def _join(context: Context, caller: Caller, wanted: JoinRequest) -> NodeToken:
    now, token_s = context.clock(), context.settings.node_token_s
    with context.agents.sessions.begin() as session:
        joined = join_node(session, caller, node_id=wanted.node_id, secret=wanted.secret, token_s=token_s, now=now)
        note(session, caller, "join", wanted.node_id, now=now, key=joined.key_id)
    return NodeToken(key_id=joined.key_id, token=joined.token, expires_utc=joined.expires_at)


@joining.post(RENEW_PATH, operation_id="renew_node_token", summary="Fetch a token for a node")
async def renew(context: ContextOf, caller: NodeKeyOf, response: Response) -> NodeToken:
    """With the node's key."""
    response.headers["Cache-Control"] = "no-store"
    return await context.agents.run(_renew, context, caller)


def _renew(context: Context, caller: Caller) -> NodeToken:
    assert caller.node_id is not None  # The database checks this too.
    token_s, now = context.settings.node_token_s, context.clock()
    with context.agents.sessions.begin() as session:
        token, until = issue_node_token(session, caller.node_id, token_s=token_s, created_by=caller.token_id, now=now)
    return NodeToken(key_id=caller.token_id, token=token, expires_utc=until)
