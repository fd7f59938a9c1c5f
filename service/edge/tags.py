"""Entity tags: the whole of an answer for If-None-Match, and within it what people can change for If-Match. Pure.

A tag is `"whole"` or `"changeable.whole"`. Steps go on all the time: whoever changes a job only wants to know that
nobody else has changed it since.
"""

import hashlib
import json
from typing import Annotated, Any

from fastapi import Depends, Header

from agent.protocol import errors
from agent.protocol.errors import Problem
from service.problems import ProblemError

HEADER_CHARS_MAX = 4_000
_Header = Annotated[
    str | None,
    Header(
        max_length=HEADER_CHARS_MAX,
        description="An ETag, or several: only if what people can change of it is as it was in one of these answers.",
    ),
]


def version_of(*changeable: Any) -> str:
    """The first part of a tag, of what people can change."""
    return hashlib.sha256(json.dumps(changeable, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tag_of(body: bytes, version: str | None) -> str:
    """The tag of an answer."""
    whole = hashlib.sha256(body).hexdigest()[:32]
    return f'"{version}.{whole}"' if version else f'"{whole}"'


def is_known(tag: str, if_none_match: str | None) -> bool:
    """Whether the caller has this answer already."""
    return if_none_match is not None and bool({tag, "*"} & set(_listed(if_none_match)))


class Precondition:
    """What the caller knows of the thing that it wants to change; everything is right without If-Match."""

    def __init__(self, if_match: str | None) -> None:
        self._if_match = if_match

    def check(self, what: str, version: str | None) -> None:
        """Raises 412 if somebody has changed it since. `version`: None if there is none."""
        if self._if_match is None:
            return
        known = {tag.strip('"').partition(".")[0] for tag in _listed(self._if_match)}
        if version is None or not known & {version, "*"}:
            detail = f"If-Match: {what} is not as it was in that answer: read it again, and then change it"
            raise ProblemError(
                Problem(title="Precondition failed", status=412, code=errors.PRECONDITION, detail=detail)
            )


async def _precondition(if_match: _Header = None) -> Precondition:
    return Precondition(if_match)


PreconditionOf = Annotated[Precondition, Depends(_precondition)]


def _listed(header: str) -> list[str]:
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]
