"""The one error body of every HTTP surface (RFC 9457 problem+json): names the field and the rule. Pure."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from agent.protocol import PROTOCOL_VERSION

PROBLEM_MEDIA_TYPE = "application/problem+json"
VERSION_MISMATCH = "protocol-version"
REPLACED = "agent-replaced"
UNAUTHENTICATED = "unauthenticated"
FORBIDDEN = "forbidden"
INVALID = "invalid"
NOT_FOUND = "not-found"
CONFLICT = "conflict"
PRECONDITION = "precondition-failed"
TOO_LARGE = "too-large"
TOO_LATE = "too-late"
TOO_MANY = "too-many-requests"
UNAVAILABLE = "unavailable"
UNEXPECTED = "unexpected"


class FieldProblem(BaseModel):
    """One field and the rule it breaks."""

    model_config = ConfigDict(frozen=True)

    field: str
    rule: str


class Problem(BaseModel):
    """What went wrong, for people and programs. `code` is one of this module's constants."""

    model_config = ConfigDict(frozen=True)

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    errors: Annotated[tuple[FieldProblem, ...], Field(max_length=256)] = ()


def version_problem(seen: object) -> Problem:
    """The answer to an agent that speaks another protocol version."""
    return Problem(
        title="Protocol version mismatch",
        status=409,
        code=VERSION_MISMATCH,
        detail=(
            f"the agent speaks protocol version {seen}, this service speaks {PROTOCOL_VERSION}: "
            "install the same liver release on both"
        ),
        errors=(FieldProblem(field="protocol_version", rule=f"must be {PROTOCOL_VERSION}"),),
    )
