"""When this service could not hear its nodes through a fault of its own: that time does not count against them.

Pure but for a lock, since the event loop and the reconcilers both use it; the times come in.
"""

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta

KEPT = timedelta(minutes=15)
"""How long it is remembered when nothing could be heard: longer than any silence that is measured."""
BEAT_S = 0.5
STALL_S = 1.0
"""An event loop that is later than this could serve nobody meanwhile."""
WAITS = timedelta(seconds=1)
"""A report that is not stored for so long waits for the service: a thousand nodes that start at once are not silent."""


class Listening:
    """`since`: nothing was heard before."""

    def __init__(self, since: datetime, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.since = since
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._deaf: list[tuple[datetime, datetime]] = []
        self._tried: dict[str, datetime] = {}
        self._waiting: dict[str, datetime] = {}
        self._beat_s: float | None = None

    def begins(self, now: datetime) -> None:
        """Nothing before counts."""
        with self._lock:
            self.since = now

    def was_deaf(self, start: datetime, end: datetime) -> None:
        """Nothing could be heard between these times."""
        with self._lock:
            self._add(start, end)

    def beat(self, now: datetime) -> None:
        """The event loop works; called from it every `BEAT_S`."""
        with self._lock:
            late_s = self._late_s()
            self._beat_s = self._monotonic()
            if late_s > STALL_S:
                self._add(now - timedelta(seconds=late_s), now)

    def tried(self, node_id: str, at: datetime) -> None:
        """The node's agent reported, and the service did not take the report, for a reason of its own."""
        with self._lock:
            self._tried[node_id] = at

    def waits(self, node_id: str, arrived: datetime) -> None:
        """The node's report has arrived, and is not stored yet."""
        with self._lock:
            self._waiting[node_id] = arrived

    def is_done(self, node_id: str) -> None:
        """No report of the node waits any more."""
        with self._lock:
            self._waiting.pop(node_id, None)

    def take_tried(self, now: datetime) -> dict[str, datetime]:
        """When each node tried last, also by a report that waits; each is given out once."""
        with self._lock:
            tried, self._tried = self._tried, {}
            for node_id in [name for name, arrived in self._waiting.items() if now - arrived >= WAITS]:
                arrived = self._waiting.pop(node_id)
                tried[node_id] = max(arrived, tried.get(node_id, arrived))
        return tried

    def silence_s(self, last_at: datetime, until: datetime) -> float:
        """For how much of the time between these two the service listened."""
        with self._lock:
            start, late_s = max(last_at, self.since), self._late_s()
            deaf = [*self._deaf]
        if late_s > STALL_S:
            deaf.append((until - timedelta(seconds=late_s), until))
        heard_s = max(0.0, (until - start).total_seconds())
        for begin, end in _merged(deaf):
            heard_s -= max(0.0, (min(end, until) - max(begin, start)).total_seconds())
        return heard_s

    def _late_s(self) -> float:
        return 0.0 if self._beat_s is None else self._monotonic() - self._beat_s - BEAT_S

    def _add(self, start: datetime, end: datetime) -> None:
        self._deaf = [span for span in _merged([*self._deaf, (start, end)]) if span[1] > end - KEPT]


def _merged(spans: list[tuple[datetime, datetime]]) -> list[tuple[datetime, datetime]]:
    found: list[tuple[datetime, datetime]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
