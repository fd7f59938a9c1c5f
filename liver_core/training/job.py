"""The contract between a user's training code and the loop: how to build one rank's part, how to do one step.

The loop owns the data cursor, the optimizer step, the window in which state may be read, and the cutover. What a job
must not do: step the optimizer, keep state outside what it names here, or cache a process group beyond its world.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch

from liver_core.layout import ParallelLayout, ParameterSpec
from liver_core.training.metrics import ReportedMetrics, checked_metrics
from liver_core.worlds.megatron import MegatronWorld


@dataclass(slots=True)
class TrainState:
    """What one rank holds of the job in one world.

    `model`: the DDP-wrapped chunk of this pipeline stage. `optimizer`: Megatron's optimizer over it. `scheduler`: an
    object with `state_dict`, `load_state_dict` and `step(increment)`, or None. `config`: Megatron's config, one
    instance per world because schedules keep functions on it.
    """

    model: Any
    optimizer: Any
    scheduler: Any
    config: Any
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The sample ids (positions in the job's endless sample sequence) of one micro-batch of one data-parallel rank."""

    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one rank learned in one step.

    `loss_sum` over `loss_count` micro-batches: zero on ranks that compute no loss. A number, or a tensor of one number
    where it was computed: the loop reads that together with the gradient norm, so that the host waits once. `tokens`:
    tokens this rank's data-parallel replica trained on, counted on one rank of the replica only, zero on the others.
    """

    loss_sum: float | torch.Tensor
    loss_count: int
    tokens: int


class TrainingJob(ABC):
    """A user's job. One instance per process; `build` may be called again, for another world, while `step` runs."""

    global_batch: int
    micro_batch: int
    seed: int
    reported: ReportedMetrics | None = None
    """Set by who calls the hooks; what is reported without it is checked only."""

    @abstractmethod
    def build(self, world: MegatronWorld) -> TrainState:
        """Make model, optimizer and scheduler on the explicit groups of `world`.

        Draw no random number and touch no global: the previous world may be training in another thread. Parameters
        need not be initialised, the loop fills them from `initial_parameter`, a checkpoint or the previous world.
        """

    @abstractmethod
    def step(self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch]) -> StepResult:
        """Forward, backward and gradient reduction for one global batch; not the optimizer step."""

    def step_in_parts(
        self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch], every: int
    ) -> Generator[None, None, StepResult]:
        """As `step`, bit for bit, but yields after every `every` micro-batches save the last, with no communication of
        the step in flight. Only jobs with `drop_step` in their file need it.

        Where the step is dropped the generator is closed; the step is then done again from its start, with the random
        streams as they were there. So a part may change nothing but gradients and those streams.
        """
        raise NotImplementedError

    @abstractmethod
    def initial_parameter(self, spec: ParameterSpec, generator: torch.Generator) -> torch.Tensor:
        """The whole unsharded parameter `spec`, fp32, drawn from `generator` only: equal in every layout."""

    def warm_up(self) -> None:
        """Open what the first step needs (data, caches); a new process calls it before it joins, outside any pause."""

    def check_layout(self, layout: ParallelLayout) -> None:
        """Raise ValueError naming field and rule where the job cannot run on `layout`."""

    def small_state(self, state: TrainState) -> Mapping[str, Any]:
        """JSON-able state of the job's own that is equal on all ranks and must follow it into the next world."""
        return {}

    def load_small_state(self, state: TrainState, small: Mapping[str, Any]) -> None:
        """Take over what `small_state` of the previous world, or of a checkpoint, gave."""

    @classmethod
    def has_validation(cls) -> bool:
        """Whether this job has a `validate` of its own."""
        return cls.validate is not TrainingJob.validate

    @classmethod
    def has_parts(cls) -> bool:
        """Whether a step of this job can be done in parts."""
        return cls.step_in_parts is not TrainingJob.step_in_parts

    def report(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Report numbers of your own for `step`, by name; call it in `on_step` or `validate`, with their step.

        What the first rank of the last pipeline stage reports is stored; on other ranks it is checked only. A value
        that is NaN or infinite is stored as null. Raises ValueError with the rule that a step, name or value breaks."""
        found = checked_metrics(values)
        if self.reported is not None:
            self.reported.take(step, found)

    def on_step(self, step: int, loss: float, state: TrainState, world: MegatronWorld) -> None:
        """Hook for logging, called on every rank after each optimizer step, never in the pause of a handoff."""

    def validate(self, step: int, state: TrainState, world: MegatronWorld) -> None:
        """Evaluate the model after step `step`, as often as the job file says (`validate_every_steps`). Called on every
        rank between two steps, never in the pause of a handoff.

        Random numbers drawn here do not move the streams of the training. No backward pass, and no change of weights,
        gradients or optimizer state.
        """
