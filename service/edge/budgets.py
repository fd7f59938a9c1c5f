"""Token buckets, one for each caller: how often somebody may ask. Pure; the time comes in. In the event loop only."""

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
        left, since_s = self._left.pop(caller, (self._burst, now_s))
        left = min(self._burst, left + max(0.0, now_s - since_s) * self._per_s)
        is_allowed = left >= 1.0
        left -= is_allowed
        self._left[caller] = (left, now_s)
        # Whoever has not asked for the longest time has a full bucket, or is one of very many.
        while len(self._left) > CALLERS_MAX:
            self._left.popitem(last=False)
        return 0.0 if is_allowed else (1.0 - left) / self._per_s
