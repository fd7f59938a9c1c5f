"""One step of a rank: whole, or in parts. Between parts it can be dropped (handoff.md section 6, rung 1b)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from liver_core.rank.active_world import ActiveWorld
from liver_core.training.job import MicroBatch, StepResult, TrainingJob
from liver_core.worlds.megatron import random_state, restore_random_state

RESERVE_S = 5.0
"""Time reserved before the deadline for a cutover at the end of a step: read gradients, then vote."""


@dataclass(frozen=True, slots=True)
class DropRule:
    """Do steps in parts of `every` micro-batches. Drop a step if its estimated end is less than `reserve_s` before the
    deadline. The estimate comes from the parts done so far."""

    every: int
    reserve_s: float = RESERVE_S

    def check(self, job: TrainingJob) -> None:
        """Raises ValueError if the job's steps cannot be done in such parts."""
        if self.every < 1:
            raise ValueError(f"drop_step.every_micro_batches: must be at least 1, is {self.every}")
        if not job.has_parts():
            raise ValueError(f"drop_step: {type(job).__name__} has no step_in_parts, so its steps cannot be dropped")

    def needs_s(self, spent_s: float, done: float) -> float:
        """Seconds from now to the end of a cutover after this step, if `done` (0..1) of the step took `spent_s`."""
        return spent_s / done - spent_s + self.reserve_s


@dataclass(frozen=True, slots=True)
class StepPlace:
    """A place between two parts of a step: how many parts are done, and which share of the step they are."""

    part: int
    done: float


def do_step(
    job: TrainingJob,
    active: ActiveWorld,
    batches: Sequence[MicroBatch],
    rule: DropRule | None,
    drops: Callable[[StepPlace], bool],
) -> StepResult | None:
    """Train on `batches`. Between two parts it calls `drops`, which gives the same answer on every rank of the world.
    If that is true, the step is dropped and the result is None.

    A dropped step restores the random streams and leaves the gradients of the parts done. Nothing else has changed. The
    next step zeroes gradients first, so the batch can be done again.
    """
    if rule is None or rule.every >= len(batches):
        return job.step(active.state, active.world, batches)
    before = random_state()
    parts = job.step_in_parts(active.state, active.world, batches, rule.every)
    for part in itertools.count(1):
        try:
            next(parts)
        except StopIteration as whole:
            return whole.value
        if drops(StepPlace(part, part * rule.every / len(batches))):
            break
    parts.close()
    restore_random_state(before)
    return None
