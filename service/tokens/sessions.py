"""Browser sessions of the status page: a signed, expiring cookie that names a token, never the token itself. Pure.

The key is of one process, so that a session is known to one service only, which also knows whether it was ended.
"""

import hashlib
import hmac
from dataclasses import dataclass

COOKIE = "liver_session"
ENDED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """`name`: random, so that two sessions of a token are two."""

    token_id: str
    name: str
    expires_unix_s: int


class EndedSessions:
    """Sessions that were ended before they expire. Of too many, those that expire first are forgotten, and then every
    session that is as old as they are counts as ended."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._up_to = 0

    def add(self, session: BrowserSession, *, now_unix_s: float) -> None:
        """It does not count any more."""
        self._names[session.name] = session.expires_unix_s
        if len(self._names) > ENDED_MAX:
            self._names = {name: expires for name, expires in self._names.items() if expires > now_unix_s}
        while len(self._names) > ENDED_MAX:
            self._up_to = self._names.pop(min(self._names, key=self._names.__getitem__))

    def __contains__(self, session: BrowserSession) -> bool:
        return session.name in self._names or session.expires_unix_s <= self._up_to


def sign(session: BrowserSession, *, key: bytes) -> str:
    """The cookie's value."""
    payload = f"{session.token_id}.{session.name}.{session.expires_unix_s}"
    return f"{payload}.{_mac(payload, key)}"


def read(value: str, *, now_unix_s: float, key: bytes) -> BrowserSession | None:
    """The session of a cookie, or None if its signature is wrong or it has expired."""
    payload, _, mac = value.rpartition(".")
    token_id, _, rest = payload.partition(".")
    name, _, expires = rest.partition(".")
    if not hmac.compare_digest(mac.encode(), _mac(payload, key).encode()) or not expires.isdecimal():
        return None
    return BrowserSession(token_id, name, int(expires)) if int(expires) > now_unix_s else None


def _mac(payload: str, key: bytes) -> str:
    return hmac.new(key, payload.encode(), hashlib.sha256).hexdigest()
