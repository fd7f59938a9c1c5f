"""What `fake_cuda` does with the reference job and with that of the docs, and what of it is told."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from liver_core.device import waits
from liver_core.layout import Manifest, Member, ParallelLayout, Roster
from liver_core.memory.device_memory import TrainingShape, rank_memory
from liver_core.memory.memory_placement import Area, areas
from liver_core.memory.overheads import DeviceOverheads
from liver_core.memory.transformer_shape import TransformerShape, manifest_of
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.step_boundary import read_numbers
from liver_core.rank.stream.source_stream import SourceStream
from liver_core.state.built_state import check_built
from liver_core.state.host_memory import move_in, wait_in_host_memory
from liver_core.state.live_state import LiveState, allocate
from liver_core.state.megatron_optimizer import adopt, settle_moments, unwrapped
from liver_core.state.optimizer_step import apply_step, start_norm
from liver_core.streaming.ring import BEFORE_ANY, SourceRing
from liver_core.training.entrypoint import load_job
from liver_core.training.gpt import GptJob
from liver_core.training.job import MicroBatch
from liver_core.worlds import megatron
from liver_core.worlds.megatron import MegatronWorld
from liver_core.worlds.nccl_groups import TorchNccl, TrainsOn
from liver_core.worlds.released_storage import released
from tests.liver_core.device import fake_cuda

SHAPE = TransformerShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=4, ffn_hidden_size=128,
    padded_vocab_size=264, seq_length=32,
)  # fmt: skip
BATCHES = (MicroBatch((0, 1)), MicroBatch((2, 3)))
RING_DEPTH = 2


class Samples:
    """Of the corpus only the shapes matter."""

    def batch(self, sample_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        size = (len(sample_ids), SHAPE.seq_length)
        names = ("tokens", "position_ids", "labels")
        return {name: torch.zeros(size, dtype=torch.long) for name in names} | {"loss_mask": torch.ones(size)}


EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"


def main() -> None:
    """Prints one JSON object."""
    fake_cuda.pretend_megatron()
    megatron.prepare_process()
    watch = fake_cuda.Watch()
    torch.tensor = watch.tensor(torch.tensor)  # type: ignore[assignment]
    with waits.pretending(fake_cuda.Streams(watch)):
        if sys.argv[1:] == ["example"]:
            found = run_example(watch)
        else:
            source, target, precision = sys.argv[1:]
            found = run(ParallelLayout.parse(source), ParallelLayout.parse(target), precision, watch)
        print(json.dumps(found))


def run(source: ParallelLayout, target: ParallelLayout, precision: str, watch: fake_cuda.Watch) -> dict[str, Any]:
    """Devices by name, host reads and copies by place and phase, and bytes as taken and as planned."""
    dtype = "bfloat16" if precision == "bf16" else "float32"
    shape = replace(SHAPE, dtype=dtype)
    manifest = manifest_of(shape)
    job, present, following = job_of(precision), world(source, 1), world(target, 2)
    megatron.activate(present)
    found: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        active = active_in(job, present, manifest)
        found["build"] = seen(watch)
        for number in ("first_step", "step"):  # The first makes the moments.
            step(job, active)
            found[number] = seen(watch)
        ring = published_step(job, active)
        found["published_step"] = seen(watch)
        with megatron.building(following), released() as hollow:
            state = check_built(job.build(following), following)
            live = adopt(state.model, state.optimizer, manifest, following)
        found["next_build"] = {**seen(watch), "peak_bytes": hollow.peak_bytes, "held_bytes": held(state, live)}
        waiting = areas(manifest, target, 0)[1:]
        found["waiting"] = waiting_on_host(live, waiting)
        found["allocated_bytes"] = allocate(live)
        found["allocate"] = seen(watch)
        found["waiting_devices"] = devices(ActiveWorld(following, state, live))["regions"]
        moved: list[tuple[int, int]] = []
        move_in(live, lambda device, host: moved.append((device, host)))
        found["move_in"] = {**seen(watch), "device_bytes": sum(device for device, _ in moved)}
        found["left_on_host"] = found["waiting"][0] + sum(host for _, host in moved)
    found["devices"] = devices(active, ring) | {
        f"next {name}": on for name, on in devices(ActiveWorld(following, state, live)).items()
    }
    planned = [sum(area.device_bytes for area in areas(manifest, layout, 0)) for layout in (source, target)]
    training = TrainingShape(shape, job.micro_batch, job.global_batch)
    found["present_bytes"] = [active.live.device_bytes, planned[0]]
    found["planned_bytes"] = planned[1]
    found["fullest_bytes"] = [rank_memory(training, layout, DeviceOverheads()).state for layout in (source, target)]
    found["ring_bytes"] = [
        sum(region.bytes for region in ring.slots.values() if region.device.type == "cuda"),
        RING_DEPTH * active.live.shards.region_numel * 4,
    ]
    return found


def run_example(watch: fake_cuda.Watch) -> dict[str, Any]:
    """Build and step the job that docs tell people to copy."""
    job_file = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    arguments = {**job_file["model"], **job_file["args"], "text": str(EXAMPLES / "my_gpt.py")}
    numbers = {"global_batch": job_file["global_batch"], "micro_batch": job_file["micro_batch"], "seed": 1}
    job = load_job(job_file["entrypoint"], arguments, **numbers, workdir=str(EXAMPLES))
    present = world(ParallelLayout(), 1)
    megatron.activate(present)
    job.warm_up()
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        with megatron.building(present):
            state = check_built(job.build(present), present)
        result = job.step(state, present, BATCHES)
    assert isinstance(result.loss_sum, torch.Tensor)
    return {"step": seen(watch), "loss": str(result.loss_sum.device)}


def job_of(precision: str) -> GptJob:
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "padded_vocab_size", "seq_length")
    arguments = {name: getattr(SHAPE, name) for name in names} | {"precision": precision, "data_prefix": "none"}
    job = GptJob(arguments, global_batch=8, micro_batch=2, seed=1)
    job._reader = Samples()  # type: ignore[assignment]
    return job


def world(layout: ParallelLayout, generation: int) -> MegatronWorld:
    members = tuple(Member(f"node-{rank}", 0) for rank in range(layout.world_size))
    roster = Roster("fake", generation, layout, members)
    store, name = dist.HashStore(), f"fake/{generation}"
    for rank in range(1, layout.world_size):
        store.set(f"{name}/gpu/{rank}", f"gpu-{rank}")  # As each peer says where it trains.
    place = TrainsOn("gpu-0", fake_cuda.CUDA, TorchNccl())
    return megatron.bring_up(roster, 0, store, host="127.0.0.1", timeout_s=5.0, name=name, place=place)


def active_in(job: GptJob, present: MegatronWorld, manifest: Manifest) -> ActiveWorld:
    with megatron.building(present):
        state = check_built(job.build(present), present)
    return ActiveWorld(present, state, adopt(state.model, state.optimizer, manifest, present))


def step(job: GptJob, active: ActiveWorld) -> None:
    """As the loop does one."""
    result = job.step(active.state, active.world, BATCHES)
    apply_step(active.state, read_numbers(result, start_norm(active.state)).norm)
    settle_moments(active.live)


class QuietStream(SourceStream):
    """Its threads do not begin: pretending is a matter of the thread that trains."""

    def _in_background(self, name: str, action: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=action, name=name)


def published_step(job: GptJob, active: ActiveWorld) -> SourceRing:
    """A step beside a handoff that streams. Returns its ring."""
    live = active.live
    ring = SourceRing(live.regions["grad"], RING_DEPTH, version=BEFORE_ANY)
    unused: Any = None
    stream = QuietStream(live, unused, ring, rank=0, target=live.layout)
    stream.attach(2, (1.0,), since=0.0)
    result = job.step(active.state, active.world, BATCHES)
    norm = read_numbers(result, start_norm(active.state)).norm
    stream.before_step(active, 3, norm, (1.0,))
    apply_step(active.state, norm)
    settle_moments(active.live)
    stream.after_step(3)
    while ring.settle_next():
        pass
    assert not stream.failure, stream.failure
    return ring


def waiting_on_host(live: LiveState, waiting: Sequence[Area]) -> list[int]:
    """Bytes of host memory taken and planned by a next world of which these areas wait there."""
    return [wait_in_host_memory(live, waiting), sum(area.host_bytes for area in waiting)]


def seen(watch: fake_cuda.Watch) -> dict[str, dict[str, int]]:
    """What happened since this was asked last."""
    found = {name: dict(+getattr(watch, name)) for name in ("reads", "copies", "strays")}
    watch.reads, watch.copies, watch.strays = Counter(), Counter(), Counter()
    return found


def held(state: Any, live: Any) -> int:
    """Bytes of the next world's parameters, buffers and regions before they are allocated."""
    module = unwrapped(state.model)
    regions = [tensor for region in live.regions.values() for tensor in region.tensors]
    tensors = (*module.parameters(), *module.buffers(), *live.buffers(), *regions)
    return sum(
        {
            id(each.untyped_storage()): each.untyped_storage().nbytes() for each in tensors if each.numel() > 1_024
        }.values()
    )


def devices(active: ActiveWorld, ring: SourceRing | None = None) -> dict[str, list[str]]:
    """What kind of tensor lies where."""

    def of(tensors: Iterable[torch.Tensor | None]) -> list[str]:
        return sorted({str(tensor.device) for tensor in tensors if tensor is not None})

    model, live = unwrapped(active.state.model), active.live
    moments = [value for owned in live.owned for value in owned.kept.values()]
    return {
        "parameters": of(model.parameters()),
        "buffers": of(model.buffers()),
        "flat buffers": of(live.buffers()),
        "regions": of(tensor for region in live.regions.values() for tensor in region.tensors),
        "moments": of(value for value in moments if torch.is_tensor(value) and value.numel() > 1),
        **({} if ring is None else {"ring": of(region.tensors[0] for region in ring.slots.values())}),
        **({} if ring is None else {"counters": of(ring.small.values())}),
    }
