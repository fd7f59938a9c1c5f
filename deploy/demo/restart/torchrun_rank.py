"""One rank of the restart baseline as it is done today: a plain Megatron script under torchrun, no agents, no handoff.

Default torch.distributed start, Megatron's global parallel_state, its distributed checkpoint; the same job and the same
steps as the live path. Writes events with wall clock times to the event file of its rank.

    torchrun --standalone --nproc-per-node 3 -m deploy.demo.restart.torchrun_rank job.json world.json
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from liver_core.gpu_environment import rank_environment, visible_gpus
from liver_core.layout import Roster

STARTED_AT = time.time()


def main(job_path: str, world_path: str) -> None:
    """Start from nothing or from a checkpoint, train up to the last step, save, exit."""
    from deploy.demo.restart.one_process import JobSpec, WorldSpec, event_file

    job_spec = JobSpec(**json.loads(Path(job_path).read_text()))
    spec = WorldSpec(**json.loads(Path(world_path).read_text()))
    gpus = visible_gpus(os.environ, ())
    os.environ.update(rank_environment(int(os.environ["LOCAL_RANK"]), gpus))
    with event_file(spec.events, int(os.environ["RANK"])) as events:
        events.write("worker_started", started_at=STARTED_AT)
        _import_everything()
        events.write("imported")
        from liver_core.training.entrypoint import load_job

        script = Script(load_job(**asdict(job_spec)), spec, events)
        script.build()
        events.write("built")
        script.load()
        events.write("loaded")
        script.train()
        script.save()
        script.leave()


def _import_everything() -> None:
    import torch

    from liver_core.worlds import cpu_compat

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        cpu_compat.apply()
    from liver_core.state import checkpoint  # noqa: F401
    from liver_core.training import gpt  # noqa: F401


class Script:
    """What a Megatron training script does, from the first group to the last checkpoint."""

    def __init__(self, job: Any, spec: Any, events: Any) -> None:
        self.job = job
        self.spec = spec
        self.events = events
        self.world: Any = None
        self.state: Any = None
        self.live: Any = None
        self.progress: Any = None

    def build(self) -> None:
        """Groups, then model and optimizer."""
        from deploy.demo.restart.one_process import start_roster

        roster = start_roster(self.spec.layout)
        shared = 0 < len(visible_gpus(os.environ, ())) < roster.layout.world_size
        self.world = _world_on_shared_gpus(roster) if shared else _plain_world(roster)
        self.state = self.job.build(self.world)
        self.live = self._live()

    def _live(self) -> Any:
        """The names under which checkpoints are read, as on the live path. Takes milliseconds."""
        import torch.distributed as dist

        from liver_core.state import megatron_optimizer as megatron
        from liver_core.state.buckets import bucket_rule
        from liver_core.state.optimizer_chain import discover_kinds, optimizer_chain

        parts: list[Any] = [None] * self.world.layout.world_size
        mine = megatron.describe(self.state.model, self.world)
        dist.all_gather_object(parts, mine, group=self.world.everyone)
        chain = optimizer_chain(self.state.optimizer)
        kinds, rule = discover_kinds(chain), bucket_rule(chain)
        manifest = megatron.merge_manifest(parts, self.state.config.num_layers, kinds, rule)
        return megatron.adopt(self.state.model, self.state.optimizer, manifest, self.world)

    def load(self) -> None:
        """A checkpoint, or the job's own initialisation."""
        from liver_core.state.checkpoint import load_checkpoint
        from liver_core.state.megatron_optimizer import fill_initial
        from liver_core.state.optimizer_step import refresh_weights
        from liver_core.state.small_state import TrainingProgress, install, reseed
        from liver_core.training.cursor import DataCursor

        job, world, state, live = self.job, self.world, self.state, self.live
        job.warm_up()
        if self.spec.checkpoint is not None:
            small = load_checkpoint(self.spec.checkpoint, job, world, state, live)
            self.progress = install(small, job, state, live, world)
            return
        fill_initial(live, job.initial_parameter, job.seed)
        refresh_weights(state)
        reseed(job, world, 0)
        self.progress = TrainingProgress(0, DataCursor(0, job.global_batch, job.micro_batch), 0)

    def train(self) -> None:
        """Train up to the last step."""
        while self.progress.step < self.spec.last_step:
            self._step()

    def _step(self) -> None:
        from liver_core.rank.step_boundary import start_total
        from liver_core.state.megatron_optimizer import settle_moments
        from liver_core.state.optimizer_step import apply_step, measure_gradients
        from liver_core.state.small_state import TrainingProgress
        from liver_core.training.cursor import chained, digest_part

        world, state, progress = self.world, self.state, self.progress
        self.events.write("forward", step=progress.step + 1)
        started = time.monotonic()
        batches = progress.cursor.batches(world.coordinates.dp, world.layout.dp)
        result = self.job.step(state, world, batches)
        part = digest_part(progress.step + 1, batches, world.coordinates)
        totals = start_total(result, part, world.everyone).wait()
        apply_step(state, measure_gradients(state))
        settle_moments(self.live)
        digest = chained(progress.digest, totals.sample_digest)
        self.progress = TrainingProgress(progress.step + 1, progress.cursor.advanced(), digest)
        self.events.step(1, self.progress, totals, time.monotonic() - started)

    def save(self) -> None:
        """Write a complete checkpoint of the last step, if the plan has one."""
        if self.spec.save_to is None:
            return
        from liver_core.state.checkpoint import snapshot, write
        from liver_core.state.small_state import collect

        path = f"{self.spec.save_to}/step-{self.progress.step:09d}"
        started = time.monotonic()
        small = collect(self.job, self.state, self.live, self.progress)
        write(snapshot(self.world, self.state), small, path, self.world.everyone)
        self.events.checkpointed(path, self.progress.step, time.monotonic() - started)

    def leave(self) -> None:
        """What a script does last."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _plain_world(roster: Roster) -> Any:
    """Groups by `init_process_group` and `initialize_model_parallel`."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from liver_core.worlds.megatron import MegatronWorld

    dist.init_process_group("cpu:gloo,cuda:nccl" if visible_gpus(os.environ, ()) else "gloo")
    parallel_state.initialize_model_parallel(roster.layout.tp, roster.layout.pp)
    rank, whole = dist.get_rank(), dist.group.WORLD
    assert whole is not None
    collection = ProcessGroupCollection.use_mpu_process_groups()
    return MegatronWorld(roster, rank, dist.HashStore(), whole, whole, whole, collection, ())


def _world_on_shared_gpus(roster: Roster) -> Any:
    """NCCL refuses two ranks on one GPU, and gloo's collectives fail there. The product's groups do not."""
    import torch.distributed as dist

    from liver_core.worlds.megatron import bring_up, prepare_process

    prepare_process()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", ""), dist.TCPStore(address, port, is_master=False))
    return bring_up(roster, int(os.environ["RANK"]), store, host="127.0.0.1", timeout_s=60.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
