"""Headers that every answer has, whoever makes it: what a browser must not do with it. Pure."""

from collections.abc import Mapping

from starlette.types import Scope

_OF_PROGRAMS = ("/api/", "/agent/", "/push/")
_ALWAYS = {"X-Content-Type-Options": "nosniff"}
_NEVER_KEPT = {"Cache-Control": "no-store"}
"""A browser would show an answer of the API again after its user has logged out."""
_ENCRYPTED = {"Strict-Transport-Security": "max-age=31536000"}
NO_PAGE = {**_ALWAYS, **_NEVER_KEPT}


def safe_headers(scope: Scope) -> Mapping[str, str]:
    """Of the answer to this request, in place of those that it may have."""
    found = NO_PAGE if scope["path"].startswith(_OF_PROGRAMS) else _ALWAYS
    return {**found, **_ENCRYPTED} if scope["scheme"] == "https" else found
