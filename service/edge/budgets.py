"""Token buckets, one for each caller: how often somebody may ask. Pure; the time comes in. In the event loop only."""

import hashlib
from collections import OrderedDict

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


class OverBudget:
    """Tokens whose callers had no request left when they last came, and who these are. To refuse them once more, nobody
    need look up again who they are."""

    def __init__(self) -> None:
        self._callers: OrderedDict[bytes, str] = OrderedDict()

    def note(self, token: str, caller: str) -> None:
        """This caller has come with this token, which is valid, and has none left."""
        self._callers[_key(token)] = caller
        while len(self._callers) > CALLERS_MAX:
            self._callers.popitem(last=False)

    def caller_of(self, token: str) -> str | None:
        """Who came with it."""
        return self._callers.get(_key(token))

    def forget(self, token: str) -> None:
        """Whoever comes with it has to be looked up."""
        self._callers.pop(_key(token), None)


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
