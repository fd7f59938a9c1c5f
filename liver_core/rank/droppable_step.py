"""One step of a rank, whole or in parts between which it can be dropped (handoff.md section 6, rung 1b)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from liver_core.rank.active_world import ActiveWorld
from liver_core.training.job import MicroBatch, StepResult, TrainingJob
from liver_core.worlds.megatron import random_state, restore_random_state

RESERVE_S = 5.0
"""What a cutover at the end of a step is given before the deadline: gradients are read, everybody votes."""


@dataclass(frozen=True, slots=True)
class DropRule:
    """Do steps in parts of `every` micro-batches. One is dropped where its end, as far as the parts done tell, is not
    `reserve_s` before the deadline."""

    every: int
    reserve_s: float = RESERVE_S

    def check(self, job: TrainingJob) -> None:
        """Raises ValueError where the job's steps cannot be done so."""
        if self.every < 1:
            raise ValueError(f"drop_step.every_micro_batches: must be at least 1, is {self.every}")
        if not job.has_parts():
            raise ValueError(f"drop_step: {type(job).__name__} has no step_in_parts, so its steps cannot be dropped")

    def needs_s(self, spent_s: float, done: float) -> float:
        """Seconds from now until a cutover at the end of the step is over, when `done` (0..1) of it took `spent_s`."""
        return spent_s / done - spent_s + self.reserve_s


@dataclass(frozen=True, slots=True)
class Place:
    """Between two parts of a step: how many of them are done, and which share of the step that is."""

    part: int
    done: float


def do_step(
    job: TrainingJob,
    active: ActiveWorld,
    batches: Sequence[MicroBatch],
    rule: DropRule | None,
    drops: Callable[[Place], bool],
) -> StepResult | None:
    """Train on `batches`; None where `drops`, asked between two parts, has said so on every rank of the world.

    After a dropped step random streams stand where they stood before it, gradients are those of a part, and all else is
    as before: the next step begins by zeroing gradients, so that the batch can be done again.
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
        if drops(Place(part, part * rule.every / len(batches))):
            break
    parts.close()
    restore_random_state(before)
    return None
