"""Who hears what a rank does. Two listeners exist: the agent's worker, and the tests' recorder."""

from __future__ import annotations

from typing import Protocol

from liver_core.handoff.messages import Order, RankStage, Reason
from liver_core.rank.step_boundary import StepTotals
from liver_core.state.small_state import TrainingProgress


class Listener(Protocol):
    """Who hears what a rank does: the agent's worker, or a test. Called from several threads; must not block."""

    def stage(
        self, request: Order, stage: RankStage, *, reason: Reason | None, measures: dict[str, float], certificate: str
    ) -> None: ...

    def step(self, generation: int, progress: TrainingProgress, totals: StepTotals, seconds: float) -> None: ...

    def checkpointed(self, path: str, step: int, seconds: float) -> None: ...

    def checkpoint_failed(self, path: str, text: str) -> None: ...
