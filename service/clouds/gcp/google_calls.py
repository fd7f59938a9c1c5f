"""Calls of Google's REST interfaces, by the ordinary chain of credentials, each with a limit of time and size."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from liver_core.layout.limits import fitting
from service.settings import ServiceSettings

ANSWER_BYTES_MAX = 32 * 1024 * 1024
CONNECT_S = 3.0
PUBSUB, LOGGING = "https://pubsub.googleapis.com", "https://logging.googleapis.com"
PROJECTS = "https://cloudresourcemanager.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_PIECE = 64 * 1024


class GoogleRefuses(Exception):
    """Google's answer was an error. `status`: of HTTP; `reason`: Google's name for it, such as PERMISSION_DENIED."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status, self.reason = status, reason


class AnswerTooLong(Exception):
    """An answer has more bytes than are read."""


@dataclass(frozen=True, slots=True)
class GoogleAnswer:
    """Of one call. `date`: the header, by Google's clock; empty if there is none."""

    fields: Mapping[str, Any]
    date: str


class GoogleCaller(Protocol):
    """Whoever asks Google."""

    def __call__(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> GoogleAnswer:
        """Raises GoogleRefuses, AnswerTooLong, and what google-auth and requests raise."""
        ...


def make_caller() -> GoogleCaller:
    """By the ordinary chain: GOOGLE_APPLICATION_CREDENTIALS, gcloud's own, the machine's account. May be used by
    several threads. Raises DefaultCredentialsError where there are none."""
    # Takes its time, and is not needed where nothing of Google is read.
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    credentials, _ = google.auth.default(scopes=[SCOPE])
    session = AuthorizedSession(credentials, max_refresh_attempts=1, refresh_timeout=10)

    def call(method: str, url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> GoogleAnswer:
        data = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        with session.request(
            method,
            url,
            data=data,
            headers=headers,
            timeout=(CONNECT_S, timeout_s),  # pyright: ignore[reportArgumentType]
            max_allowed_time=timeout_s + 2 * CONNECT_S,
            allow_redirects=False,
            stream=True,
        ) as response:
            content = b""
            for piece in response.iter_content(_PIECE):
                content += piece
                if len(content) > ANSWER_BYTES_MAX:
                    raise AnswerTooLong(f"an answer of {url} has more than {ANSWER_BYTES_MAX} bytes")
            if response.status_code != 200:
                raise _refusal(response.status_code, content)
            return GoogleAnswer(_fields(content, response.status_code), response.headers.get("Date", ""))

    return call


def endpoint(settings: ServiceSettings, usual: str) -> str:
    """Where an interface of Google is, without a slash at its end."""
    return (settings.gcp_endpoint_url or usual).rstrip("/")


def _fields(content: bytes, status: int) -> dict[str, Any]:
    try:
        found = json.loads(content or b"{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise GoogleRefuses(status, "", "the answer is no mapping of fields in JSON")
    return found


def _refusal(status: int, content: bytes) -> GoogleRefuses:
    try:
        error = json.loads(content)["error"]
        return GoogleRefuses(status, str(error.get("status", "")), fitting(str(error.get("message", ""))))
    except (ValueError, TypeError, KeyError, AttributeError):
        return GoogleRefuses(status, "", fitting(content[:500].decode("utf-8", "replace")))
