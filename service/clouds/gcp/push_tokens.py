"""Whether a push comes from Pub/Sub: its OpenID token is checked against the keys that Google publishes.

Times go by the service's clock, not the host's. Keys are kept, and fetched again seldom, whatever comes.
"""

import base64
import binascii
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any

from liver_core.layout.limits import UTC_MOST

CERTS_URL = "https://www.googleapis.com/oauth2/v1/certs"
ISSUERS = ("accounts.google.com", "https://accounts.google.com")
TOKEN_CHARS_MAX = 8_192
SKEW_S = 60.0
"""By so much Google's clock and ours may differ."""
LIVES_MAX_S = 24 * 3600.0
FETCH_S, KEYS_BYTES_MAX, KEYS_MAX = 5.0, 64 * 1024, 32
FRESH_S, KEPT_S, ASK_AGAIN_S = 3_600.0, 24 * 3600.0, 30.0
"""Keys are fetched again after so long, used for so long if they cannot be, and asked for at most so often: a token
that names a key which nobody knows must not make us ask Google."""


class PushRefused(Exception):
    """The push is not believed. `status`: 401 if the token is no good, 403 if it is somebody else's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class KeysUnknown(Exception):
    """Google's keys cannot be had now, so that nobody can tell."""


@dataclass(frozen=True, slots=True)
class PushToken:
    """A token taken apart; nothing of it is believed yet."""

    key_id: str
    claims: Mapping[str, Any]
    signed: bytes
    signature: bytes


def take_apart(token: str) -> PushToken:
    """Raises PushRefused for what is no token with the only signature that Google makes."""
    parts = token.split(".")
    if len(token) > TOKEN_CHARS_MAX or len(parts) != 3:
        raise PushRefused(401, "the token is no JSON Web Token")
    try:
        head, claims = (json.loads(_decoded(part)) for part in parts[:2])
        signature = _decoded(parts[2])
    except (ValueError, RecursionError):
        raise PushRefused(401, "the token is no JSON Web Token") from None
    if not isinstance(head, dict) or not isinstance(claims, dict) or not isinstance(head.get("kid"), str):
        raise PushRefused(401, "the token names no key")
    if head.get("alg") != "RS256":
        raise PushRefused(401, "the token is not signed with RS256")
    return PushToken(head["kid"], claims, f"{parts[0]}.{parts[1]}".encode(), signature)


def check_claims(claims: Mapping[str, Any], *, audience: str, account: str, now: datetime) -> None:
    """Raises PushRefused. Pure."""
    if claims.get("iss") not in ISSUERS:
        raise PushRefused(401, "iss: the token is not Google's")
    begins, ends, at = _moment(claims.get("iat")), _moment(claims.get("exp")), now.timestamp()
    if begins is None or ends is None:
        raise PushRefused(401, "iat, exp: the token must say from when to when it counts")
    if not begins - SKEW_S <= at <= ends + SKEW_S:
        raise PushRefused(401, "iat, exp: the token does not count now; see whether the clocks differ")
    if ends - begins > LIVES_MAX_S:
        raise PushRefused(401, "exp: the token counts for too long")
    if claims.get("aud") != audience:
        raise PushRefused(403, "aud: the token is for another audience than LIVER_SERVICE_GCP_PUSH_AUDIENCE")
    if claims.get("email") != account or claims.get("email_verified") is not True:
        raise PushRefused(403, "email: the token is of another account than LIVER_SERVICE_GCP_PUSH_ACCOUNT")


def _moment(value: Any) -> float | None:
    """Seconds since 1970; None for what is no time: a number of a token may have thousands of digits."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= UTC_MOST else None


def fetch_keys(url: str) -> Mapping[str, str]:
    """Certificates (PEM) by id of their key. Raises KeysUnknown."""
    import httpx

    content = b""
    try:
        with httpx.stream("GET", url, timeout=FETCH_S, follow_redirects=False) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():
                content += piece
                if len(content) > KEYS_BYTES_MAX:
                    raise KeysUnknown(f"{url} answers with more than {KEYS_BYTES_MAX} bytes")
        found = json.loads(content)
    except (httpx.HTTPError, ValueError) as error:
        raise KeysUnknown(f"{url}: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or not 0 < len(found) <= KEYS_MAX:
        raise KeysUnknown(f"{url} answers with something else than keys")
    return {str(name): str(value) for name, value in found.items()}


class GoogleKeys:
    """Keys as Google publishes them. May be used by several threads. `monotonic_s`: for tests."""

    def __init__(
        self,
        url: str,
        *,
        fetch: Callable[[str], Mapping[str, str]] = fetch_keys,
        monotonic_s: Callable[[], float] = monotonic,
    ) -> None:
        self._url, self._fetch, self._monotonic_s = url, fetch, monotonic_s
        self._lock = threading.Lock()
        self._keys: Mapping[str, str] = {}
        self._fetched_at = self._asked_at = float("-inf")
        self._trouble = "they were not asked for"

    def find(self, key_id: str) -> str | None:
        """The certificate of this key; None if Google has no such key. Raises KeysUnknown."""
        with self._lock:
            now = self._monotonic_s()
            is_stale = now - self._fetched_at > FRESH_S or key_id not in self._keys
            if is_stale and now - self._asked_at > ASK_AGAIN_S:
                self._asked_at = now
                try:
                    self._keys, self._fetched_at, self._trouble = dict(self._fetch(self._url)), now, ""
                except KeysUnknown as error:
                    self._trouble = str(error)
            if now - self._fetched_at > KEPT_S:
                raise KeysUnknown(f"the keys of Google cannot be had: {self._trouble}")
            if key_id not in self._keys and self._trouble:
                raise KeysUnknown(f"the keys of Google cannot be had: {self._trouble}")
            return self._keys.get(key_id)


def check_push(token: str, keys: GoogleKeys, *, audience: str, account: str, now: datetime) -> None:
    """Raises PushRefused and KeysUnknown."""
    parts = take_apart(token)
    # Before any key is fetched: most of what is not ours ends here.
    check_claims(parts.claims, audience=audience, account=account, now=now)
    certificate = keys.find(parts.key_id)
    if certificate is None:
        raise PushRefused(401, "the token is signed with a key that Google does not publish")
    from google.auth import crypt

    try:
        is_true = crypt.RSAVerifier.from_string(certificate).verify(parts.signed, parts.signature)
    except ValueError:
        raise KeysUnknown("a key of Google cannot be read") from None
    if not is_true:
        raise PushRefused(401, "the token's signature is not Google's")


def _decoded(part: str) -> bytes:
    try:
        return base64.b64decode(part.replace("-", "+").replace("_", "/") + "=" * (-len(part) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
