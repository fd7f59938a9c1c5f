"""Requests to a rank, stored until its next boundary. Thread-safe: other threads store, the main thread takes.

Once the rank shows a request at a boundary, all ranks may agree on it. It cannot be withdrawn until that boundary is
over.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from liver_core.handoff.ready_tag import NOTHING_WANTED, TAG_MAX, BoundaryPhase, pack
from liver_core.state.checkpoint_files import LeaseStanding


@dataclass(slots=True)
class StoredRequests:
    """The requests stored on this rank. `checkpoint`: the number of the request. `stop`: why."""

    checkpoint: int | None = None
    stop: str | None = None


@dataclass(slots=True)
class BoundaryRequests:
    """See the module. `retired`: handoff ids that the main thread has not dealt with yet. `checkpoints_taken`: the
    number of the newest request for a checkpoint that was carried out. `leased_until`: when this rank's step lease ends
    (time.monotonic seconds); a rank that was never given one needs none. `changed`: its lock also guards the pending
    handoff."""

    stored: StoredRequests = field(default_factory=StoredRequests)
    retired: list[str] = field(default_factory=list)
    checkpoints_taken: int = 0
    leased_until: float = math.inf
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> None:
        """Wait until `condition` is true, or `deadline` (time.monotonic seconds). Checks twice a second at least."""
        with self.changed:
            while not condition() and (left_s := deadline - time.monotonic()) > 0:
                self.changed.wait(min(0.5, left_s))

    def retire(self, handoff_id: str) -> None:
        """Nothing needs the old world of this handoff any more."""
        with self.changed:
            self.retired.append(handoff_id)
            self.changed.notify_all()

    def checkpoint(self, number: int) -> None:
        """Write a checkpoint at the first boundary at which every rank has the same request number. Numbers grow;
        repeating one changes nothing."""
        with self.changed:
            if number > self.checkpoints_taken:
                self.stored.checkpoint = number

    def stop(self, why: str) -> None:
        """End after the first step at whose boundary every rank has this request."""
        with self.changed:
            self.stored.stop = why
            self.changed.notify_all()

    def lease(self, until: float) -> None:
        """Hold a step lease until then (time.monotonic seconds, the same for all processes of the machine)."""
        with self.changed:
            self.leased_until = until
            self.changed.notify_all()

    def raise_lease(self, until: float) -> None:
        """As `lease`, unless it holds a longer one."""
        with self.changed:
            self.leased_until = max(self.leased_until, until)
            self.changed.notify_all()

    def has_lease(self) -> bool:
        """Whether this rank holds a step lease now."""
        with self.changed:
            return time.monotonic() < self.leased_until

    def standing(self) -> LeaseStanding:
        """What decides whether a checkpoint of this world may be published now."""
        with self.changed:
            return LeaseStanding(time.monotonic() < self.leased_until, self.stored.stop is not None)

    def word(self) -> int:
        """The word of this rank's most urgent request: stop, or a checkpoint. A ready tag comes between the two."""
        with self.changed:
            stored = self.stored
            if stored.stop is not None:
                return pack(1, BoundaryPhase.STOP)
            if stored.checkpoint is not None:
                return pack(stored.checkpoint % TAG_MAX, BoundaryPhase.CHECKPOINT)
            return NOTHING_WANTED

    def take_checkpoint(self) -> int:
        """The number of the agreed request for a checkpoint. Removes the request."""
        with self.changed:
            number, self.stored.checkpoint = self.stored.checkpoint, None
            assert number is not None
            self.checkpoints_taken = number
            return number

    def take_retired(self) -> list[str]:
        """Take the handoffs retired since the last call."""
        with self.changed:
            retired, self.retired = self.retired, []
            return retired
