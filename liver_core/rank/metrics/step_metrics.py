"""What is measured of each step, and what the job reports of its own after it: to the agent, and to the event files.

One rank of a world speaks for the job. Nothing here runs in the pause of a handoff: what was measured of a step that is
handed over is published with its hooks, by the next world.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from liver_core.layout import Coordinates, ParallelLayout
from liver_core.layout.limits import BUILT_IN_METRICS
from liver_core.rank.reporter import Listener
from liver_core.state.optimizer_step import learning_rate
from liver_core.training.job import TrainingJob, TrainState
from liver_core.training.metrics import ReportedMetrics

if TYPE_CHECKING:
    from liver_core.rank.metrics.event_files import EventFiles
    from liver_core.worlds.megatron import MegatronWorld


LAST_WRITE_S = 5.0


@dataclass(frozen=True, slots=True)
class StepMeasures:
    """Of one optimizer step; equal on all ranks. `learning_rate`: that of the step, not of the next one."""

    loss: float
    gradient_norm: float
    learning_rate: float | None


def measures_before(state: TrainState, loss: float, norm: float) -> StepMeasures:
    """To be called before the optimizer step, which also sets the rate of the next one."""
    return StepMeasures(loss, norm, learning_rate(state))


def speaks_for_job(at: Coordinates, layout: ParallelLayout) -> bool:
    """Whether what this rank reports is what the job reports: the first rank of the last pipeline stage, which has
    what is computed from the model's output."""
    return (at.tp, at.cp, at.dp, at.pp) == (0, 0, 0, layout.pp - 1)


class StepMetrics:
    """Opens `job.report` for the hooks of a step, and publishes what they reported with what was measured."""

    def __init__(self, job: TrainingJob, listener: Listener, files: EventFiles | None) -> None:
        self._listener = listener
        self._files = files
        self._reported = job.reported = ReportedMetrics()

    def open(self, step: int) -> None:
        """The hooks of this step run now."""
        self._reported.open(step)

    def publish(self, world: MegatronWorld, step: int, measured: StepMeasures) -> None:
        """The hooks of this step are done. Hands its numbers on, and waits for nobody."""
        reported = self._reported.close()
        if not speaks_for_job(world.coordinates, world.layout):
            return
        built_in = zip(BUILT_IN_METRICS, (measured.loss, measured.learning_rate, measured.gradient_norm), strict=True)
        known = {name: value for name, value in built_in if value is not None}
        values = {name: value if math.isfinite(value) else None for name, value in known.items()} | reported
        self._listener.metrics(world.generation, step, values)
        if self._files is not None:
            self._files.put(world.generation, step, values)

    def soon(self) -> None:
        """A checkpoint is being written: a restart from it does none of the steps before again."""
        if self._files is not None:
            self._files.soon()

    def close(self) -> None:
        """Wait until the event files hold everything; not long, since a disk may not answer."""
        if self._files is not None:
            self._files.close(LAST_WRITE_S)
