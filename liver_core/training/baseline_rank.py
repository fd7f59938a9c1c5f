"""One rank of the restart baseline as it is done today: a plain Megatron script under torchrun, no agents, no handoff.

Default torch.distributed start, Megatron's global parallel_state, its distributed checkpoint; the same job and the same
steps as the live path. Writes what happens with the wall clock to the event file of its rank.

    torchrun --standalone --nproc-per-node 3 -m liver_core.training.baseline_rank job.json world.json
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STARTED_AT = time.time()


def main(job_path: str, world_path: str) -> None:
    """Start from nothing or from a checkpoint, train up to the last step, save, exit."""
    from liver_core.training.solo import JobSpec, WorldSpec, event_file, load_job

    job_spec = JobSpec(**json.loads(Path(job_path).read_text()))
    spec = WorldSpec(**json.loads(Path(world_path).read_text()))
    with event_file(spec.events, int(os.environ["RANK"])) as events:
        events.write("worker_started", started_at=STARTED_AT)
        _import_everything()
        events.write("imported")
        job = load_job(job_spec)
        world, state, live = _build(job, spec)
        events.write("built")
        progress = _load(job, spec, world, state, live)
        events.write("loaded")
        progress = _train(job, spec, world, state, live, progress, events)
        _save(job, spec, world, state, live, progress, events)
    import torch.distributed as dist

    dist.destroy_process_group()


def _import_everything() -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import torch

    from liver_core.worlds import cpu_compat

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        cpu_compat.apply()
    from liver_core.tensors import checkpoint  # noqa: F401
    from liver_core.training import gpt  # noqa: F401


def _build(job: Any, spec: Any) -> tuple[Any, Any, Any]:
    """Groups by `init_process_group` and `initialize_model_parallel`, then model and optimizer."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from liver_core.tensors.megatron import (
        adopt,
        describe_parameters,
        discover_kinds,
        distributed_optimizer,
        merge_manifest,
    )
    from liver_core.training.solo import start_roster
    from liver_core.worlds.megatron import MegatronWorld

    dist.init_process_group("gloo")
    roster = start_roster(spec.layout)
    parallel_state.initialize_model_parallel(roster.layout.tp, roster.layout.pp)
    rank, whole = dist.get_rank(), dist.group.WORLD
    assert whole is not None
    collection = ProcessGroupCollection.use_mpu_process_groups()
    world = MegatronWorld(roster, rank, dist.HashStore(), whole, whole, collection, ())
    state = job.build(world)
    stages: list[Any] = [None] * world.layout.pp
    dist.all_gather_object(stages, describe_parameters(state.model, world), group=collection.pp)
    kinds = discover_kinds(distributed_optimizer(state.optimizer))
    manifest = merge_manifest(stages, state.config.num_layers, kinds)
    return world, state, adopt(state.model, state.optimizer, manifest, world)


def _load(job: Any, spec: Any, world: Any, state: Any, live: Any) -> Any:
    from liver_core.tensors.checkpoint import load_checkpoint
    from liver_core.tensors.megatron import fill_initial
    from liver_core.tensors.step import refresh_weights
    from liver_core.training.cursor import DataCursor
    from liver_core.training.small_state import Progress, install, reseed

    job.warm_up()
    if spec.checkpoint is not None:
        return install(load_checkpoint(spec.checkpoint, world, state, live), job, state, live, world)
    fill_initial(live, job.initial_parameter, job.seed)
    refresh_weights(state)
    reseed(job, world, 0)
    return Progress(0, DataCursor(0, job.global_batch, job.micro_batch), 0)


def _train(job: Any, spec: Any, world: Any, state: Any, live: Any, progress: Any, events: Any) -> Any:
    from liver_core.tensors.megatron import settle_moments
    from liver_core.tensors.step import apply_step, measure_gradients
    from liver_core.training.boundary import total
    from liver_core.training.cursor import chained, digest_part
    from liver_core.training.small_state import Progress

    while progress.step < spec.last_step:
        events.write("forward", step=progress.step + 1)
        started = time.monotonic()
        batches = progress.cursor.batches(world.coordinates.dp, world.layout.dp)
        result = job.step(state, world, batches)
        totals = total(result, digest_part(progress.step + 1, batches, world.coordinates), world.everyone)
        apply_step(state, measure_gradients(state))
        settle_moments(live, state.model, world)
        digest = chained(progress.digest, totals.sample_digest)
        progress = Progress(progress.step + 1, progress.cursor.advanced(), digest)
        events.step(1, progress, totals, time.monotonic() - started)
    return progress


def _save(job: Any, spec: Any, world: Any, state: Any, live: Any, progress: Any, events: Any) -> None:
    if spec.save_to is None:
        return
    from liver_core.tensors.checkpoint import snapshot, write
    from liver_core.training.small_state import collect

    path = f"{spec.save_to}/step-{progress.step:09d}"
    started = time.monotonic()
    write(snapshot(world, state), collect(job, state, live, progress), path, world.everyone)
    events.checkpointed(path, progress.step, time.monotonic() - started)


if __name__ == "__main__":
    main(*sys.argv[1:])
