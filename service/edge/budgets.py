"""Token buckets, one for each caller: how often somebody may ask. Pure; the time comes in. In the event loop only."""

import hashlib
from collections import OrderedDict

from service.tokens.operations import Caller

CALLERS_MAX = 10_000


class Buckets:
    """Each caller has `burst` requests at first, and gets `per_s` more each second, up to `burst` again."""

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str, *, now_s: float) -> float:
        """0, and one request is taken; or in how many seconds the caller has one again, and none is taken."""
        left = self._now_left(caller, now_s)
        self._left.pop(caller, None)
        is_allowed = left >= 1.0
        left -= is_allowed
        self._left[caller] = (left, now_s)
        # Whoever has not asked for the longest time has a full bucket, or is one of very many.
        while len(self._left) > CALLERS_MAX:
            self._left.popitem(last=False)
        return 0.0 if is_allowed else (1.0 - left) / self._per_s

    def has_one(self, caller: str, *, now_s: float) -> bool:
        """Whether the caller may ask now. None is taken."""
        return self._now_left(caller, now_s) >= 1.0

    def _now_left(self, caller: str, now_s: float) -> float:
        left, since_s = self._left.get(caller, (self._burst, now_s))
        return min(self._burst, left + max(0.0, now_s - since_s) * self._per_s)


class Shown:
    """What was shown by whoever was admitted, be it a token or a cookie, and who that was when it last came. It admits
    nobody: it tells who has no request left, and who is no stranger, before anybody is looked up."""

    def __init__(self) -> None:
        self._callers: OrderedDict[bytes, Caller] = OrderedDict()

    def note(self, secret: str, caller: Caller) -> None:
        """This caller has come with it, and it was valid."""
        key = _key(secret)
        self._callers[key] = caller
        self._callers.move_to_end(key)
        while len(self._callers) > CALLERS_MAX:
            self._callers.popitem(last=False)

    def caller_of(self, secret: str) -> Caller | None:
        """Who came with it."""
        return self._callers.get(_key(secret))

    def forget(self, secret: str) -> None:
        """It is not valid any more."""
        self._callers.pop(_key(secret), None)


def _key(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()
