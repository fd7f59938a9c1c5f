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

from liver_core.handoff.messages import HandoffId, Reason
from liver_core.handoff.ready_tag import NOTHING_WANTED, TAG_MAX, BoundaryPhase, pack, ready_tag
from liver_core.state.checkpoint_files import LeaseStanding


@dataclass(slots=True)
class StoredRequests:
    """The requests stored on this rank. `checkpoint`: the number of the request. `stop`: why."""

    ready: tuple[str, int] | None = None
    checkpoint: int | None = None
    stop: str | None = None


@dataclass(slots=True)
class BoundaryRequests:
    """See the module. `aborts` and `retired`: handoff ids that the main thread has not dealt with yet.
    `checkpoints_taken`: the number of the newest request for a checkpoint that was carried out. `leased_until`: when
    this rank's step lease ends (time.monotonic seconds); a rank that was never given one needs none."""

    stored: StoredRequests = field(default_factory=StoredRequests)
    aborts: dict[str, Reason] = field(default_factory=dict)
    retired: list[str] = field(default_factory=list)
    checkpoints_taken: int = 0
    leased_until: float = math.inf
    changed: threading.Condition = field(default_factory=threading.Condition)

    def permit(self, handoff_id: str, plan_revision: int) -> None:
        """Show the ready tag from the next boundary on."""
        with self.changed:
            self.stored.ready = (handoff_id, plan_revision)
            self.changed.notify_all()

    def permits(self, handoff_id: str) -> bool:
        """Whether any revision of this handoff has permission."""
        with self.changed:
            return self.stored.ready is not None and self.stored.ready[0] == handoff_id

    def wake(self) -> None:
        """Wake the waiting threads, so that they check their condition again."""
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> None:
        """Wait until `condition` is true, or `deadline` (time.monotonic seconds). Checks twice a second at least."""
        with self.changed:
            while not condition() and (left_s := deadline - time.monotonic()) > 0:
                self.changed.wait(min(0.5, left_s))

    def withdraw(self, handoff_id: str) -> None:
        """Stop showing the ready tag. A boundary in progress is not affected."""
        with self.changed:
            if self.stored.ready is not None and self.stored.ready[0] == handoff_id:
                self.stored.ready = None
            self.changed.notify_all()

    def abort(self, handoff_id: str, reason: Reason) -> None:
        """Withdraw, and make the main thread drop the next world."""
        self.withdraw(handoff_id)
        with self.changed:
            self.aborts[handoff_id] = reason
            self.changed.notify_all()

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
        """The word that this rank shows at a boundary: its most urgent request, of stop, ready and checkpoint."""
        with self.changed:
            stored = self.stored
            if stored.stop is not None:
                return pack(1, BoundaryPhase.STOP)
            if stored.ready is not None:
                return pack(ready_tag(HandoffId(stored.ready[0]), stored.ready[1]), BoundaryPhase.READY)
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

    def take_abort(self, handoff_id: str) -> Reason | None:
        """Take the reason why this handoff was aborted, or None."""
        with self.changed:
            return self.aborts.pop(handoff_id, None)

    def take_retired(self) -> list[str]:
        """Take the handoffs retired since the last call."""
        with self.changed:
            retired, self.retired = self.retired, []
            return retired
