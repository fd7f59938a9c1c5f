"""What a rank says of a handoff, in order; the word that a cutover has begun waits, since it would cost the pause."""

from __future__ import annotations

import threading

from liver_core.handoff.messages import Order, RankStage, Reason
from liver_core.rank.listener import Listener

CUTTING_OVER_SAID_S = 0.25
"""How long that word may wait. Agents and service that act on it would take the cores from the ranks that cut over."""


class Saying:
    """Passes stages on to the listener; any thread may call."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._unsaid: Order | None = None

    def cutting_over(self, request: Order) -> None:
        """Say CUTTING_OVER when the pause takes long, else just before whatever is said next of this handoff."""
        with self._lock:
            self._unsaid = request
        later = threading.Timer(CUTTING_OVER_SAID_S, self._catch_up, (request,))
        later.daemon = True
        later.start()

    def stage(
        self,
        request: Order,
        stage: RankStage,
        *,
        reason: Reason | None = None,
        measures: dict[str, float] | None = None,
        certificate: str = "",
    ) -> None:
        """This rank is at `stage` of the handoff of `request`."""
        self._catch_up(request)
        self._listener.stage(request, stage, reason=reason, measures=dict(measures or {}), certificate=certificate)

    def _catch_up(self, request: Order) -> None:
        with self._lock:
            if self._unsaid is request:
                self._unsaid = None
                self._listener.stage(request, RankStage.CUTTING_OVER, reason=None, measures={}, certificate="")
