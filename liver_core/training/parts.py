"""One step of a rank, whole or in parts between which it can be dropped (handoff.md section 6, rung 1b)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from liver_core.training.job import MicroBatch, StepResult, TrainingJob
from liver_core.training.next_world import ActiveWorld
from liver_core.worlds.megatron import random_state, restore_random_state


def check_parts(job: TrainingJob, every: int | None) -> None:
    """Raises ValueError where the job's steps are to be done in parts of `every` micro-batches and cannot be."""
    if every is not None and every < 1:
        raise ValueError(f"drop_step.every_micro_batches: must be at least 1, is {every}")
    if every is not None and not job.has_parts():
        raise ValueError(f"drop_step: {type(job).__name__} has no step_in_parts, so its steps cannot be dropped")


def do_step(
    job: TrainingJob,
    active: ActiveWorld,
    batches: Sequence[MicroBatch],
    every: int | None,
    drops: Callable[[int], bool],
) -> StepResult | None:
    """Train on `batches`; None where `drops`, asked after part 1, 2, ..., has said so on every rank of the world.

    After a dropped step random streams stand where they stood before it, gradients are those of a part, and all else is
    as before: the next step begins by zeroing gradients, so that the batch can be done again.
    """
    if every is None or every >= len(batches):
        return job.step(active.state, active.world, batches)
    before = random_state()
    parts = job.step_in_parts(active.state, active.world, batches, every)
    for part in itertools.count(1):
        try:
            next(parts)
        except StopIteration as whole:
            return whole.value
        if drops(part):
            break
    parts.close()
    restore_random_state(before)
    return None
