"""A rank reports its stages in order. The report that a cutover has begun is delayed, because sending it would lengthen
the pause. Two listeners exist: the agent's worker, and the tests' recorder."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from liver_core.handoff.messages import Order, RankStage, Reason
from liver_core.rank.step_boundary import StepTotals
from liver_core.state.small_state import TrainingProgress

CUTTING_OVER_DELAY_S = 0.25
"""How long that report may wait. Agents and service would act on it and take CPU time from the ranks that cut over."""


class Listener(Protocol):
    """Receives a rank's reports: the agent's worker, or a test. Called from several threads; must not block."""

    def stage(
        self, request: Order, stage: RankStage, *, reason: Reason | None, measures: dict[str, float], certificate: str
    ) -> None: ...

    def step(self, generation: int, progress: TrainingProgress, totals: StepTotals, seconds: float) -> None: ...

    def metrics(self, generation: int, step: int, values: Mapping[str, float | None]) -> None: ...

    def checkpointed(self, path: str, step: int, seconds: float, asked: int) -> None: ...

    def checkpoint_failed(self, path: str, step: int, text: str, asked: int) -> None: ...


class StageReporter:
    """Passes stages on to the listener. Any thread may call."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._delayed: Order | None = None

    def cutting_over(self, request: Order) -> None:
        """Report CUTTING_OVER once the pause has taken long, or just before the next report of this handoff."""
        with self._lock:
            self._delayed = request
        later = threading.Timer(CUTTING_OVER_DELAY_S, self._send_delayed, (request,))
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
        self._send_delayed(request)
        self._listener.stage(request, stage, reason=reason, measures=dict(measures or {}), certificate=certificate)

    def _send_delayed(self, request: Order) -> None:
        with self._lock:
            if self._delayed is request:
                self._delayed = None
                self._listener.stage(request, RankStage.CUTTING_OVER, reason=None, measures={}, certificate="")
