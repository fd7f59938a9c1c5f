"""Caches nodes' tokens for a while after they were verified: an agent calls with the same one every few seconds. Pure.

Whoever revokes a key tells every service (`TOKENS` in `service.db.wake`), and all of them forget what they keep. Before
that is too old, all of it is looked up again together: for each alone that costs as much as storing its reports.
"""

import hashlib
import threading
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from service.tokens.operations import Caller
from service.tokens.tables import Role

FRESH = timedelta(seconds=30)
"""The longest time that the token of a node whose key was revoked still works, where the service cannot be told."""
RENEWED_AFTER = timedelta(seconds=8)
"""How old a verification is when it is made again together with the others."""
KEPT_MAX = 16_384
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class RecentNodes:
    """Finds a token only while its verification is fresh and it has not expired. Other roles are never cached."""

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[Caller, datetime]] = {}
        self._lock = threading.Lock()
        self.times_forgotten = 0

    def find(self, token: str, *, now: datetime) -> Caller | None:
        """The caller with the token; None means that it must be looked up."""
        caller, verified_at = self._kept.get(_key(token), (None, now))
        if caller is None or not timedelta(0) <= now - verified_at < FRESH:
            return None
        return caller if caller.expires_at is None or now < caller.expires_at else None

    def node_of(self, token: str) -> str | None:
        """Whose token it was when it was last looked up, however long ago: for what gives no right to anything."""
        caller, _ = self._kept.get(_key(token), (None, None))
        return caller.node_id if caller is not None else None

    def forget(self) -> None:
        """Tokens may have been revoked: each is looked up again."""
        with self._lock:
            self.times_forgotten += 1
            self._kept = {key: (caller, _LONG_AGO) for key, (caller, _) in self._kept.items()}

    def keep(self, token: str, caller: Caller, *, now: datetime, seen: int) -> None:
        """The token was looked up and is valid. `seen`: `times_forgotten` before that; whatever was revoked since then
        may be this one."""
        if caller.role is not Role.NODE:
            return
        key = _key(token)
        with self._lock:
            if seen != self.times_forgotten:
                return
            self._kept.pop(key, None)
            if len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = (caller, now)

    def due(self, *, now: datetime) -> list[str]:
        """The ids of the tokens to look up again: all that have not expired, and were not verified just now."""
        return [
            caller.token_id
            for caller, verified_at in list(self._kept.values())
            if not timedelta(0) <= now - verified_at < RENEWED_AFTER
            and (caller.expires_at is None or now < caller.expires_at)
        ]

    def renew(self, token_ids: Collection[str], *, now: datetime, seen: int) -> None:
        """These were looked up again and are valid. `seen`: as in `keep`."""
        with self._lock:
            if seen != self.times_forgotten:
                return
            renewed = {key: (caller, now) for key, (caller, _) in self._kept.items() if caller.token_id in token_ids}
            # The one verified longest ago stays the first.
            self._kept = {key: kept for key, kept in self._kept.items() if key not in renewed} | renewed


def _key(token: str) -> bytes:
    # By hash, so that the time of a lookup shows nothing about the cached tokens.
    return hashlib.sha256(token.encode()).digest()
