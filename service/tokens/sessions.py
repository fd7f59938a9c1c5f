"""Browser sessions of the status page: a signed, expiring cookie that names a token, never the token itself. Pure."""

import hashlib
import hmac

COOKIE = "liver_session"


def sign(token_id: str, *, expires_unix_s: int, key: bytes) -> str:
    """The cookie's value."""
    payload = f"{token_id}.{expires_unix_s}"
    return f"{payload}.{_mac(payload, key)}"


def read(value: str, *, now_unix_s: float, key: bytes) -> str | None:
    """The token id of a cookie, or None if its signature is wrong or it has expired."""
    payload, _, mac = value.rpartition(".")
    token_id, _, expires = payload.partition(".")
    if not hmac.compare_digest(mac.encode(), _mac(payload, key).encode()) or not expires.isdecimal():
        return None
    return token_id if int(expires) > now_unix_s else None


def _mac(payload: str, key: bytes) -> str:
    return hmac.new(key, payload.encode(), hashlib.sha256).hexdigest()
