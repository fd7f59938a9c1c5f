"""Calls the REST API for the client verbs: finds service and token, and turns every failure into one clear sentence."""

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import unquote
from uuid import uuid4

import typer

from service.cli.columns import escaped, fitted_text

if TYPE_CHECKING:
    import ssl

    import httpx

DEFAULT_URL = "http://127.0.0.1:8470"
DEFAULT_DATA_DIR = "~/.local/share/liver"
TIMEOUT_S = 15.0
TOKEN_CHARS_MAX = 256
PAGE_ROWS_MAX = 1_000
TOO_MANY, UNAVAILABLE = 429, 503
SENT_AGAIN_MAX, SEND_AGAIN_S = 2, 1.0
AFTER_S_MAX = 5.0
"""So long a read that was refused for now waits at most, whatever the answer says."""

ServiceUrl = Annotated[
    str, typer.Option("--service-url", envvar="LIVER_SERVICE_URL", help="Where the service listens.", metavar="URL")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="LIVER_TOKEN_FILE",
        help="File with the token; else LIVER_TOKEN, else operator.token of the service's data directory.",
        metavar="FILE",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="How many at most.")]
Every = Annotated[bool, typer.Option("--all", help="Every one, however many there are.")]
LISTED = 100
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]


def check_names(path: str) -> None:
    """Fail where a name in the address is one by which the address would be another one."""
    names = [unquote(part) for part in path.partition("?")[0].split("/")[1:]]
    if any(name in ("", ".", "..") or "/" in name for name in names):
        fail(f"{unquote(path)}: no name may be empty, or . or .., or have / in it")


def fail(text: str, *, code: int = 1) -> NoReturn:
    """Say on standard error what is wrong and leave with a status that is not zero."""
    lines = escaped(f"error: {text}").splitlines()
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [part for line in lines for part in fitted_text(line, width=width)]
    typer.echo("\n".join(lines), err=True)
    raise typer.Exit(code)


def text_of(path: Path, option: str, *, bytes_max: int) -> str:
    """What a file that was named with this option holds. Fails where it cannot be read or is longer."""
    try:
        if path.stat().st_size > bytes_max:
            fail(f"{option} {path}: has more than {bytes_max} bytes")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{option} {path}: cannot be read: {error}")


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token and where it was found, for error messages; its text is never shown."""

    secret: str
    origin: str


def find_token(token_file: Path | None) -> Token:
    """From the file given, LIVER_TOKEN, or the data directory of a service on this machine. Fails naming all three."""
    if token_file is not None:
        return _from_file(token_file, "--token-file")
    if secret := os.environ.get("LIVER_TOKEN", "").strip():
        return _checked(secret, "LIVER_TOKEN")
    data_dir = Path(os.environ.get("LIVER_SERVICE_DATA_DIR", DEFAULT_DATA_DIR)).expanduser()
    default = data_dir / "tokens" / "operator.token"
    if default.is_file():
        return _from_file(default, "data directory")
    fail(f"no token: give --token-file FILE, or set LIVER_TOKEN_FILE or LIVER_TOKEN (and there is no {default})")


def _from_file(path: Path, option: str) -> Token:
    try:
        return _checked(path.read_text().strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{option}: cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}")


def _checked(secret: str, origin: str) -> Token:
    if not secret or len(secret) > TOKEN_CHARS_MAX or not secret.isascii() or not secret.isprintable():
        fail(f"{origin} does not hold a token: one line like liver_<id>_<secret> is expected")
    return Token(secret, origin)


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose certificates are believed: those in the file, or the system's."""

    ca_file: Path | None

    def context(self) -> "ssl.SSLContext":
        """For https. Fails naming the file that cannot be used."""
        import ssl

        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            fail(f"--tls-ca: {self.ca_file} cannot be used: {error.strerror or error}")


TRUST: ContextVar[Trust] = ContextVar("TRUST")
"""What the command was told to trust, before any verb."""


class ServiceClient:
    """One service. Every method fails the command with a clear sentence instead of raising."""

    def __init__(self, url: str, token: Token, trust: Trust) -> None:
        import httpx

        self._url = url.rstrip("/")
        self._token = token
        if not self._url.startswith(("http://", "https://")):
            fail(f"--service-url: {url!r} must begin with http:// or https://")
        try:
            self._http = httpx.Client(
                base_url=self._url,
                headers={"Authorization": f"Bearer {token.secret}"},
                timeout=httpx.Timeout(TIMEOUT_S, connect=5.0),
                verify=trust.context() if self._url.startswith("https://") else False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            fail(f"--service-url: {url!r} is not an address: {error}")

    def get(self, path: str, **params: Any) -> Any:
        """GET as JSON; parameters that are None are left out."""
        return self._send("GET", path, params={name: value for name, value in params.items() if value is not None})

    def listed(self, path: str, *, limit: int, every: bool = False, **params: Any) -> list[dict[str, Any]]:
        """The first `limit` rows of a list, or every one, page by page. Rows that are left out are noted on standard
        error."""
        rows: list[dict[str, Any]] = []
        params = {name: value for name, value in params.items() if value is not None}
        following: str | None = path
        while following is not None and (every or len(rows) < limit):
            # The address of a next page has the parameters within it.
            size = PAGE_ROWS_MAX if every else min(limit - len(rows), PAGE_ROWS_MAX)
            response = self._answer("GET", following, params=params | {"limit": size} if following == path else None)
            rows += self._parsed(response)
            following = response.links.get("next", {}).get("url")
        if following is not None or (not every and len(rows) > limit):
            typer.echo("note: there are more; --all lists every one, --limit so many", err=True)
        return rows if every else rows[:limit]

    def post(
        self,
        path: str,
        *,
        content: bytes | None = None,
        content_type: str = "application/json",
        key: str | None = None,
        answer_s: float = TIMEOUT_S,
    ) -> Any:
        """POST as JSON. Where the answer is lost, sent again under the same key: the service carries it out once.
        `answer_s`: how long it may take."""
        headers = {"Content-Type": content_type, "Idempotency-Key": key or str(uuid4())}
        for _ in range(SENT_AGAIN_MAX):
            response = self._try(path, content=content, headers=headers, timeout=answer_s)
            if response is not None and response.status_code != UNAVAILABLE:
                break
            time.sleep(SEND_AGAIN_S)
        else:
            response = self._answer("POST", path, content=content, headers=headers, timeout=answer_s)
        if response.status_code >= 400:
            self._refuse(response)
        return self._parsed(response)

    def _try(self, path: str, **arguments: Any) -> "httpx.Response | None":
        """None if no answer came, though the service may have got the request."""
        import httpx

        check_names(path)
        try:
            return self._http.post(path, **arguments)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            fail(self._unreachable(error))
        except httpx.TransportError:
            return None

    def put(self, path: str, body: dict[str, Any]) -> Any:
        """PUT as JSON."""
        return self._send("PUT", path, json=_finite(body))

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        """PATCH as JSON."""
        return self._send("PATCH", path, json=_finite(body))

    def delete(self, path: str) -> None:
        """DELETE, which has no answer."""
        self._answer("DELETE", path)

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[str]]:
        """The data of each event of a server-sent-event stream. Raises ConnectionError when the stream breaks, or the
        service has no time to open it."""
        import httpx

        timeout = httpx.Timeout(TIMEOUT_S, read=None)
        try:
            with self._http.stream("GET", path, timeout=timeout) as response:
                if response.status_code in (TOO_MANY, UNAVAILABLE):
                    raise ConnectionError(f"the service at {self._url} is too busy (status {response.status_code})")
                if response.status_code >= 400:
                    response.read()
                    self._refuse(response)
                yield (line.removeprefix("data:").strip() for line in response.iter_lines() if line.startswith("data:"))
        except httpx.HTTPError as error:
            raise ConnectionError(self._unreachable(error)) from error

    def _send(self, method: str, path: str, **arguments: Any) -> Any:
        return self._parsed(self._answer(method, path, **arguments))

    def _answer(self, method: str, path: str, **arguments: Any) -> "httpx.Response":
        import httpx

        check_names(path)
        try:
            response = self._http.request(method, path, **arguments)
            for _ in range(SENT_AGAIN_MAX if method == "GET" else 0):
                if response.status_code not in (TOO_MANY, UNAVAILABLE):
                    break
                time.sleep(_after_s(response))
                response = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            fail(self._unreachable(error))
        if response.status_code >= 400:
            self._refuse(response)
        return response

    def _parsed(self, response: "httpx.Response") -> Any:
        try:
            return response.json()
        except ValueError:
            fail(f"{self._url} answered with something that is not JSON: is it a LiveR service?")

    def _unreachable(self, error: Exception) -> str:
        detail = str(error) or type(error).__name__
        return (
            f"no answer from the service at {self._url}: {detail}; is it running (liver serve), is --service-url right?"
        )

    def _refuse(self, response: "httpx.Response") -> NoReturn:
        """A problem+json answer for people: the sentence, then every field with the rule it breaks."""
        try:
            problem = response.json()
        except ValueError:
            problem = None
        if not isinstance(problem, dict) or "detail" not in problem:
            fail(f"{self._url} answered {response.status_code}: is it a LiveR service?")
        if response.status_code == 401:
            fail(f"the service refused the token from {self._token.origin}: it is unknown, expired or revoked")
        found = problem.get("errors") or ()
        if not found:
            fail(str(problem["detail"]))
        fields = "".join(f"\n  {item.get('field')}: {item.get('rule')}" for item in found)
        fail(f"{problem.get('title')}:{fields}")


def _finite(body: dict[str, Any]) -> dict[str, Any]:
    """The same. Fails naming a number that JSON does not have."""
    for name, value in body.items():
        if isinstance(value, float) and not math.isfinite(value):
            fail(f"{name}: must be a finite number, is {value}", code=2)
    return body


def _after_s(response: "httpx.Response") -> float:
    """When to ask again, as the answer says in seconds."""
    said = response.headers.get("Retry-After", "")
    return min(float(said), AFTER_S_MAX) if said.isdecimal() else SEND_AGAIN_S


def connect(service_url: str, token_file: Path | None) -> ServiceClient:
    """A client for the options every client verb takes."""
    return ServiceClient(service_url, find_token(token_file), TRUST.get(Trust(None)))
