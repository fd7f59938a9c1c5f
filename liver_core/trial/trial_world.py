"""A job in one world of its own: built, filled and stepped by the functions that the training loop uses for it.

No handoff, no agent, no background work. With several ranks every method is a collective of all of them.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from liver_core.layout import Manifest, Member, ParallelLayout, Roster
from liver_core.memory.memory_placement import GRAD
from liver_core.rank.step_boundary import start_total
from liver_core.same_value import same_value
from liver_core.state import megatron_optimizer as megatron
from liver_core.state.buckets import bucket_rule
from liver_core.state.built_state import check_built
from liver_core.state.checkpoint import load_checkpoint, snapshot, write
from liver_core.state.live_state import LiveState, allocate, free, state_kinds
from liver_core.state.optimizer_chain import discover_kinds, optimizer_chain
from liver_core.state.optimizer_step import apply_step, measure_gradients, refresh_weights
from liver_core.state.small_state import TrainingProgress, collect, install, reseed
from liver_core.training.cursor import DataCursor, chained, digest_part
from liver_core.training.job import MicroBatch, StepResult, TrainingJob, TrainState
from liver_core.training.metrics import ReportedMetrics
from liver_core.worlds.megatron import (
    MegatronWorld,
    activate,
    bring_up,
    building,
    connect,
    random_state,
    retire,
    seed_streams,
)
from liver_core.worlds.nccl_groups import CONNECT_S
from liver_core.worlds.released_storage import released

_HOST = "127.0.0.1"
_GROUP_S = 60.0


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One step over the whole world."""

    loss: float
    norm: float
    seconds: float
    hook_s: float


class TrialWorld:
    """One rank of it. `build`, `lay_out`, then `fill` or `load`, then `step`."""

    def __init__(self, job: TrainingJob, layout: ParallelLayout, rank: int, store: dist.Store, name: str) -> None:
        members = tuple(Member(f"try-{each}", 0) for each in range(layout.world_size))
        roster = Roster(name, 1, layout, members)
        self.job = job
        self._reported = job.reported = job.reported or ReportedMetrics()
        self.world: MegatronWorld = bring_up(
            roster, rank, store, host=_HOST, timeout_s=_GROUP_S, collective_s=_GROUP_S, name=name
        )
        connect(self.world, CONNECT_S, since=time.monotonic())
        self.progress = TrainingProgress(0, DataCursor(0, job.global_batch, job.micro_batch), 0)
        self._state: TrainState | None = None
        self._live: LiveState | None = None

    @property
    def state(self) -> TrainState:
        """What the job built."""
        assert self._state is not None
        return self._state

    @property
    def live(self) -> megatron.LiveState:
        """Its state as regions."""
        assert self._live is not None
        return self._live

    def build(self) -> None:
        """As a first world is built: under its own default group, with nothing of it active."""
        with building(self.world):
            self._state = check_built(self.job.build(self.world), self.world)

    def build_draws(self) -> bool:
        """Build as a next world is built, without memory, and drop it: whether that moves the random streams of this
        process."""
        seed_streams(self.world, seed=self.job.seed, step=0)
        before = random_state()
        with building(self.world), released():
            self.job.build(self.world)
        return not _same_streams(before, random_state())

    def describe(self) -> Manifest:
        """The manifest of the whole job, of what its stages say of themselves."""
        chain = optimizer_chain(self.state.optimizer)
        parts: list[Any] = [None] * self.world.layout.world_size
        mine = megatron.describe(self.state.model, self.world)
        dist.all_gather_object(parts, mine, group=self.world.everyone)
        kinds, rule = discover_kinds(chain), bucket_rule(chain)
        return megatron.merge_manifest(parts, self.state.config.num_layers, kinds, rule)

    def lay_out(self, manifest: Manifest) -> None:
        """Regions over the state, and this world as the one that trains."""
        self._live = megatron.adopt(self.state.model, self.state.optimizer, manifest, self.world)
        allocate(self.live)
        self.live.step_tensors.begin()
        activate(self.world)

    def fill(self) -> None:
        """From the job's own initialisation."""
        self.live.step_tensors.put_back()
        with building(self.world):
            megatron.fill_initial(self.live, self.job.initial_parameter, self.job.seed)
        reseed(self.job, self.world, 0)
        refresh_weights(self.state)

    def save(self, path: str) -> None:
        """A checkpoint of where the job is."""
        write(snapshot(self.world, self.state), self.small_state(), path, self.world.background)

    def load(self, path: str) -> None:
        """Go on where the checkpoint was written."""
        with building(self.world):
            small = load_checkpoint(path, self.job, self.world, self.state, self.live)
        self.progress = install(small, self.job, self.state, self.live, self.world)
        refresh_weights(self.state)

    def small_state(self) -> dict[str, Any]:
        """What must follow the job besides tensors. Raises ValueError where it does not survive JSON."""
        small = collect(self.job, self.state, self.live, self.progress)
        for part in ("scheduler", "job"):
            name = "scheduler.state_dict()" if part == "scheduler" else "small_state()"
            try:
                again = json.loads(json.dumps(small[part]))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: must hold plain JSON (numbers, texts, lists, dicts): {error}") from error
            if not same_value(again, small[part]):
                raise ValueError(f"{name}: comes back from JSON as {again}, but is {small[part]}; keys must be texts")
        return small

    @property
    def batches(self) -> tuple[MicroBatch, ...]:
        """Of this rank in the next step."""
        return self.progress.cursor.batches(self.world.coordinates.dp, self.world.layout.dp)

    def rewind(self) -> None:
        """Random streams, and what a step changes beside parameters, as the next step starts with."""
        seed_streams(self.world, seed=self.job.seed, step=self.progress.step)
        self.live.step_tensors.put_back()

    def gradients(self) -> StepResult:
        """Forward, backward and reduction of the next step, from where it starts."""
        self.rewind()
        result = self.job.step(self.state, self.world, self.batches)
        return replace(result, loss_sum=float(result.loss_sum)) if isinstance(result, StepResult) else result

    def step_draws(self) -> bool:
        """Whether a step draws random numbers, as dropout does."""
        self.rewind()
        before = random_state()
        self.job.step(self.state, self.world, self.batches)
        return not _same_streams(before, random_state())

    def reseed(self) -> None:
        """Random streams as any world has them that begins at this step."""
        reseed(self.job, self.world, self.progress.step)

    def step(self) -> TrialStep:
        """The next step, as the loop does it."""
        started, number, batches = time.monotonic(), self.progress.step + 1, self.batches
        self.live.step_tensors.begin()
        result = self.job.step(self.state, self.world, batches)
        part = digest_part(number, batches, self.world.coordinates)
        totals = start_total(result, part, self.world.everyone).wait()
        norm = measure_gradients(self.state)
        apply_step(self.state, norm)
        megatron.settle_moments(self.live)
        digest = chained(self.progress.digest, totals.sample_digest)
        self.progress = TrainingProgress(number, self.progress.cursor.advanced(), digest)
        ended = time.monotonic()
        self._reported.open(number)
        self.job.on_step(number, totals.loss, self.state, self.world)
        return TrialStep(totals.loss, norm, ended - started, time.monotonic() - ended)

    def contents(self) -> dict[str, torch.Tensor]:
        """A copy of masters and moments, and of what steps change beside parameters."""
        kept = {kind: torch.cat(self.live.regions[kind].tensors) for kind in state_kinds(self.live.manifest)}
        beside = [tensor.reshape(-1) for tensor in self.live.step_tensors.tensors]
        return kept | ({"bias of experts": torch.cat(beside)} if beside else {})

    def reduced(self) -> torch.Tensor:
        """A copy of the reduced gradients, in Megatron's order."""
        return torch.cat(self.live.regions[GRAD].tensors)

    def weights(self) -> torch.Tensor:
        """A copy of what the forward pass uses."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.state.model.parameters()])

    def close(self) -> None:
        """Give groups and memory back."""
        retire(self.world)
        if self._live is not None:
            free(self._live)


def _same_streams(first: Any, second: Any) -> bool:
    tracked = first.tracked.keys() == second.tracked.keys() and all(
        torch.equal(state, second.tracked[name]) for name, state in first.tracked.items()
    )
    device = first.device is None or torch.equal(first.device, second.device)
    return tracked and device and torch.equal(first.host, second.host)
