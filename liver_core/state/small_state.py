"""The small state of a job: what the next world needs besides tensors, as JSON.

Step and data position, schedule, hyper-parameters by content, per-parameter step counts, the job's own state. JSON
keeps floats bit for bit (shortest round-trip representation). `reseed` derives random streams again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from liver_core.certificate import MASK, CertificatePlan
from liver_core.layout import ParallelLayout
from liver_core.state.live_state import LiveState
from liver_core.state.megatron_optimizer import attach_moments, element_scalars
from liver_core.state.optimizer_step import (
    everywhere,
    group_key,
    group_values,
    hyper_parameters,
    set_hyper_parameters,
)
from liver_core.state.step_counts import digest_of
from liver_core.state.step_tensors import version_sums
from liver_core.training.cursor import DataCursor
from liver_core.training.job import TrainingJob, TrainState
from liver_core.worlds.megatron import MegatronWorld, seed_streams


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far the job is: optimizer steps applied, samples consumed by them, digest of those samples."""

    step: int
    cursor: DataCursor
    digest: int


def collect(job: TrainingJob, state: TrainState, live: LiveState, progress: TrainingProgress) -> dict[str, Any]:
    """The small state at a boundary. Equal on all ranks of the world (asserted for the parts that could differ)."""
    return {
        "step": progress.step,
        "consumed_samples": progress.cursor.consumed,
        "sample_digest": progress.digest,
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
        "hyper_parameters": hyper_parameters(state),
        "element_scalars": element_scalars(live),
        "stepped": live.optimizer.has_stepped,
        "job": dict(job.small_state(state)),
    }


def install(
    small: Mapping[str, Any], job: TrainingJob, state: TrainState, live: LiveState, world: MegatronWorld
) -> TrainingProgress:
    """Set the small state of a world that already has masters and moments. Returns how far the job is."""
    # Not every optimizer counts: momentum alone is state too. Checkpoints from before this was kept have counts.
    stepped = small.get("stepped", bool(small["element_scalars"]))
    if stepped and not live.optimizer.has_stepped:
        attach_moments(live, small["element_scalars"])
    if state.scheduler is not None and small["scheduler"] is not None:
        if hasattr(state.scheduler, "num_steps"):
            # Megatron's own counts on from where it stands when it is loaded.
            state.scheduler.num_steps = 0
        state.scheduler.load_state_dict(small["scheduler"])
    set_hyper_parameters(state, small["hyper_parameters"])
    job.load_small_state(state, small["job"])
    reseed(job, world, small["step"])
    cursor = DataCursor(small["consumed_samples"], job.global_batch, job.micro_batch)
    return TrainingProgress(small["step"], cursor, small["sample_digest"])


def optimizer_counts(live: LiveState) -> dict[str, Any]:
    """What `collect` says of this rank's optimizer: the part of the small state that is under the certificate."""
    return {
        "hyper_parameters": group_values(live.optimizer),
        "element_scalars": element_scalars(live),
        "stepped": live.optimizer.has_stepped,
    }


def count_sums(live: LiveState, plan: CertificatePlan, small: Mapping[str, Any]) -> list[int]:
    """The counts of `small` as a certificate: of each parameter of `plan` a number modulo 2^64. The sums over all ranks
    of two worlds are equal if every element has the same counts in both.

    A source adds its own counts (`optimizer_counts`), a target those that it will install.
    """
    counted = live.optimizer.form.counted
    counts = {everywhere(group["key"]): group.get("counts", {}) for group in small["hyper_parameters"]}
    beside = [small["element_scalars"], small["stepped"]]
    places = {part.region_offset: part.name for part in live.shards.parameters if part.numel}
    names = {id(owned.main): places[owned.window.start] for owned in live.owned}
    digests = {
        names[id(parameter)]: digest
        for group in live.optimizer.groups
        for digest in [digest_of([counts.get(group_key(group, counted)), *beside])]
        for parameter in group["params"]
    }
    sizes = zip(plan.parameters, plan.counted, strict=True)
    return [digests.get(name, 0) * elements & MASK for name, elements in sizes]


def beside_sums(live: LiveState, plan: CertificatePlan, target: ParallelLayout) -> list[int]:
    """This source rank's counts, and of what steps change beside parameters both versions, which one rank of each stage
    adds for all ranks of `target` that hold it."""
    counts = count_sums(live, plan, optimizer_counts(live))
    if live.rank % live.layout.stage_size:
        return [*counts, *(0 for _ in live.manifest.whole)]
    return [*counts, *version_sums(live.manifest, live.step_tensors.encoded(), target.stage_size)]


def reseed(job: TrainingJob, world: MegatronWorld, step: int) -> None:
    """Derive this rank's random streams again from (seed, step, tensor rank, pipeline rank, data rank).

    A stream belongs to a rank's coordinates in one layout and means nothing in another, so streams do not move with the
    state. Every world that starts at `step` in the same layout draws the same numbers.
    """
    seed_streams(world, seed=job.seed, step=step)
