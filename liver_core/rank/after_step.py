"""What is due after a step: the user's hooks, checkpoints, and the end of the job.

A step that is handed over ends in the pause. What is due after it is done in the next world, once that has computed
its first gradients. The pause is over then, and the state is still that of the step handed over.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from liver_core.handoff.messages import Reason
from liver_core.handoff.ready_tag import Agreement, BoundaryPhase
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.boundary_requests import BoundaryRequests
from liver_core.rank.checkpoint_writer import LAST_CHECKPOINT_S, CheckpointWriter
from liver_core.rank.metrics.step_metrics import StepMeasures, StepMetrics
from liver_core.state.checkpoint_files import STEP, Author
from liver_core.state.megatron_arguments import megatron_arguments
from liver_core.state.small_state import TrainingProgress, collect
from liver_core.training.job import TrainingJob
from liver_core.worlds.agreed_work import first_rank
from liver_core.worlds.megatron import random_state, restore_random_state


class Ending(StrEnum):
    """How the work of a rank process ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    LEFT = "left"
    ABORTED = "aborted"
    BROKEN = "broken"


class Ended(Exception):
    """This rank has no more work."""

    def __init__(self, how: Ending, reason: Reason | None = None) -> None:
        super().__init__(how)
        self.how = how
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Write `path/step-N` every `every_steps` steps, when the work ends, and on request. Keep the newest `keep`. One
    that is due while another is being written waits for `waits_s`, then training goes on and it comes late."""

    path: str
    every_steps: int
    keep: int
    waits_s: float = 1.0

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        return step % self.every_steps == 0

    def path_of(self, step: int) -> str:
        """The folder of the checkpoint after this step."""
        return f"{self.path}/{STEP}{step:09d}"


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A step that was handed over, with the small state after it if a checkpoint is due."""

    step: int
    measured: StepMeasures
    small: dict[str, Any] | None


class AfterStep:
    """See the module. All ranks of a world do the same after the same step, so everything here may be a collective."""

    def __init__(
        self,
        job: TrainingJob,
        requests: BoundaryRequests,
        writer: CheckpointWriter,
        metrics: StepMetrics,
        *,
        rule: CheckpointPlan | None,
        last_step: int | None,
        validate_every: int | None = None,
    ) -> None:
        """`validate_every`: validate after every so many steps. Raises ValueError if the job has no validation."""
        if validate_every is not None and not job.has_validation():
            raise ValueError(f"validate_every_steps: {type(job).__name__} has no method validate")
        self._job = job
        self._requests = requests
        self._writer = writer
        self._metrics = metrics
        self._rule = rule
        self._last_step = last_step
        self._validate_every = validate_every
        self._waiting: HandedOver | None = None
        self._late_in = 0
        """The generation in which a checkpoint was due while one was being written, 0 without one."""
        self.hook: tuple[str, float] | None = None
        """What of the job runs now between two steps, and since when, on the steady clock. Other threads read it."""

    def do(
        self, active: ActiveWorld, progress: TrainingProgress, measured: StepMeasures, agreement: Agreement | None
    ) -> None:
        """All that is due after an ordinary step, at whose boundary there was this agreement. Raises Ended."""
        phase = None if agreement is None else agreement.phase
        self._run_hooks(active, progress.step, measured)
        ended = self._ended(progress.step, phase)
        asked = phase is BoundaryPhase.CHECKPOINT
        if self._is_wanted(active, progress.step, asked or ended is not None) and self._may_write(
            active, progress.step, ended
        ):
            number = self._requests.take_checkpoint() if asked else 0
            self._write(active, self._small(active, progress), asked=number)
        if ended is not None:
            raise ended

    def _is_wanted(self, active: ActiveWorld, step: int, is_asked: bool) -> bool:
        is_late = self._late_in == active.world.generation
        return self._rule is not None and (is_asked or is_late or self._rule.is_due(step))

    def _may_write(self, active: ActiveWorld, step: int, ended: Ended | None) -> bool:
        """Whether no rank is still writing a checkpoint. One that is due all the same is written as soon as none is;
        one that was asked for is asked for again at the next boundary; the last one comes to nothing, and that is told.
        A collective."""
        assert self._rule is not None
        is_late = self._late_in == active.world.generation
        waits_s = LAST_CHECKPOINT_S if ended is not None else 0.0 if is_late else self._rule.waits_s
        with self._named("checkpoint"):
            is_free = self._writer.is_free(active.world, waits_s)
        if ended is not None and not is_free:
            self._writer.give_up(self._rule.path_of(step), step, "the one before was still being written", active.world)
        self._late_in = 0 if is_free else active.world.generation
        return is_free

    def _ended(self, step: int, phase: BoundaryPhase | None) -> Ended | None:
        if self.is_last(step):
            return Ended(Ending.FINISHED)
        if phase is BoundaryPhase.STOP:
            return Ended(Ending.STOPPED, Reason(self._requests.stored.stop or "stop requested", "training"))
        return None

    def is_last(self, step: int) -> bool:
        """Whether the job is done after this step."""
        return self._last_step is not None and step >= self._last_step

    def put_off(self, active: ActiveWorld, progress: TrainingProgress, measured: StepMeasures) -> None:
        """The step was handed over, and the pause is not over: keep what is due after it for `do_put_off`."""
        due = self._rule is not None and (self._rule.is_due(progress.step) or self.is_last(progress.step))
        small = self._small(active, progress) if due else None
        self._waiting = HandedOver(progress.step, measured, small)

    def do_put_off(self, active: ActiveWorld) -> None:
        """What is due after a step that was handed over, if the world began with one. Call it when gradients of the
        next step are computed and nothing of it is in flight."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        # The next step has changed these already, which it does before masters and moments.
        with active.live.step_tensors.as_before():
            self._run_hooks(active, waiting.step, waiting.measured)
            if waiting.small is not None and self._may_write(active, waiting.step, self._ended(waiting.step, None)):
                self._write(active, waiting.small)

    def _run_hooks(self, active: ActiveWorld, step: int, measured: StepMeasures) -> None:
        self._metrics.open(step)
        with self._named("on_step"):
            self._job.on_step(step, measured.loss, active.state, active.world)
        if self._validate_every is not None and step % self._validate_every == 0:
            before = random_state()
            with self._named("validate"):
                self._job.validate(step, active.state, active.world)
            restore_random_state(before)
        self._metrics.publish(active.world, step, measured)

    def _small(self, active: ActiveWorld, progress: TrainingProgress) -> dict[str, Any]:
        # Training goes on while it is written, and may change what the job or a scheduler of its own gave.
        return copy.deepcopy(collect(self._job, active.state, active.live, progress))

    def _write(self, active: ActiveWorld, small: dict[str, Any], *, asked: int = 0) -> None:
        assert self._rule is not None
        path, arguments = self._rule.path_of(small["step"]), megatron_arguments(self._job, active.state, active.world)
        small = small | Author(active.world.roster.job_id, active.world.generation).as_json()
        self._metrics.soon()
        with self._named("checkpoint"):
            self._writer.start(active, small, arguments, path, keep=self._rule.keep, asked=asked)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        with self._named("checkpoint"):
            self._writer.close()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        self.hook = what, time.monotonic()
        try:
            yield
        finally:
            self.hook = None


def check_finite(
    what: str, value: float, *, here: Sequence[torch.Tensor | float], group: dist.ProcessGroup, phase: str
) -> None:
    """`value` is equal on all ranks of `group`, and `here` is what this rank adds to it. If it is not finite, raises
    Ended on all ranks and names the first where it is not."""
    if math.isfinite(value):
        return
    rank = first_rank(not all(bool(torch.as_tensor(part).isfinite().all()) for part in here), group)
    where = "" if rank is None else f", first on rank {rank}"
    text = f"the {what} is {value}{where}; the step was not applied (on_nonfinite is stop)"
    raise Ended(Ending.FAILED, Reason(text, phase, rank))
