"""One rank of the reference job on a GPU that has no memory and computes nothing: shapes, devices and sizes only.

Run as a program, in a process of its own: it tells torch that there is a GPU. Prints what it found, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as tracker
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.liver_core.peak_memory import PeakMemory

GPU = torch.device("cuda", 0)
SEQUENCE, MICRO_BATCHES = 64, 2


class HostReads(TorchDispatchMode):
    """Where the host waits for a value of the device: the function of ours, or of Megatron's, that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].is_cuda:
                self._note("item")
            # Megatron asks whether the generator of the host is unchanged.
            return not args[0].is_cuda if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func.namespace == "c10d" and func._opname.endswith("coalesced_"):
            # Fake tensors know the other collectives.
            return FakeWork().boxed()
        if func is torch.ops.aten._to_copy.default and args[0].is_cuda and str(kwargs.get("device")) == "cpu":
            self._note("copy")
        return func(*args, **kwargs)

    def _note(self, kind: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            for package in ("/liver_core/", "/megatron/core/"):
                if package in frame.filename and "/tests/" not in frame.filename:
                    place = package.strip("/").split("/")[0] + "/" + frame.filename.rsplit(package, 1)[1]
                    self.places[f"{place}:{frame.name}:{kind}"] += 1
                    return


def constructed(mode: FakeTensorMode):
    """What torch's CUDA build has: a tensor of any geometry over a storage of any size."""

    def construct(whole: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
        with _disable_current_modes():
            made = torch.empty(0, dtype=whole["dtype"], device="meta")
            made.set_(storage, whole["storage_offset"], whole["size"], whole["stride"])
        storage.resize_(0)
        return FakeTensor(mode, made, GPU)

    return construct


def pretend(stack: ExitStack, mode: FakeTensorMode) -> None:
    """Have torch say that there is one GPU."""
    stack.enter_context(mock.patch.object(torch.nn.Module, "cuda", on_device))
    stack.enter_context(mock.patch.object(torch.Tensor, "type", type_name))
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: GPU,
        "device_count": lambda: 1,
        "get_rng_state": lambda *_: state,
        "set_rng_state": lambda *_: None,
        "manual_seed": lambda *_: None,
        "synchronize": lambda *_: None,
        "mem_get_info": lambda *_: (70 * 2**30, 80 * 2**30),
        "get_device_capability": lambda *_: (9, 0),
        "current_stream": lambda *_: mock.MagicMock(),
        "default_stream": lambda *_: mock.MagicMock(),
        "Stream": mock.MagicMock,
        "Event": mock.MagicMock,
    }
    stack.enter_context(mock.patch.object(tracker, "_get_cuda_rng_state", lambda *_, **__: state))
    stack.enter_context(mock.patch.object(tracker, "_set_cuda_rng_state", lambda *_, **__: None))
    for name, answer in answers.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, answer))
    stack.enter_context(mock.patch.object(torch.nn.Module, "bfloat16", as_bfloat16))
    stack.enter_context(mock.patch.object(dist, "all_gather_object", gather_own))
    # Without Transformer Engine or Apex, Megatron reads the norm of every parameter on the host. With one it does this.
    stack.enter_context(mock.patch.object(clip_grads, "multi_tensor_applier", lambda *_: (norm(), None)))
    # Backward passes run in threads of the device, which torch for CPUs does not have.
    stack.enter_context(mock.patch.object(torch.autograd, "backward", lambda *_, **__: None))
    stack.enter_context(mock.patch.object(schedules, "custom_backward", lambda *_, **__: None))
    stack.enter_context(
        mock.patch.object(
            torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", constructed(mode), create=True
        )
    )


def on_device(module: torch.nn.Module) -> torch.nn.Module:
    """As Module.cuda, which would swap parameters too."""
    for part in module.modules():
        for name, tensor in part._parameters.items():
            if tensor is not None and not tensor.is_cuda:
                moved = part._parameters[name] = torch.nn.Parameter(tensor.detach().to(GPU))
                moved.__dict__.update({key: value for key, value in vars(tensor).items() if key not in vars(moved)})
        for name, tensor in part._buffers.items():
            part._buffers[name] = None if tensor is None else tensor.to(GPU)
    return module


_TYPE = torch.Tensor.type
_NAMES = {torch.float32: "FloatTensor", torch.bfloat16: "BFloat16Tensor"}


def type_name(self: torch.Tensor, dtype: Any = None, **more: Any) -> Any:
    """A fake tensor does not always say that it is on the device."""
    if dtype is not None or self.dtype not in _NAMES or not self.is_cuda:
        return _TYPE(self, dtype, **more)
    return f"torch.cuda.{_NAMES[self.dtype]}"


def norm() -> torch.Tensor:
    return torch.zeros(1, device=GPU)


def gather_own(gathered: list[Any], own: Any, group: Any = None) -> None:
    """All ranks have the same as this one."""
    gathered[:] = [own] * len(gathered)


def lend_device_guard() -> None:
    """Torch for CPUs has no code that switches to a CUDA device. Its code for "meta", which does nothing, will do."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[CUDA] = guards[META]


CUDA, META = 1, 14
"""c10::DeviceType."""


def as_bfloat16(module: torch.nn.Module) -> torch.nn.Module:
    """Module.bfloat16 would swap parameters, which fake ones refuse; real ones get new data, as here."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)
    return module


def fake_group(store, ranks, rank, *, name, **_limits) -> dist.ProcessGroup:
    """A group whose collectives do nothing."""
    from liver_core.worlds import groups

    prefix = dist.PrefixStore(f"{name}/", store)
    at, size = tuple(ranks).index(rank), len(ranks)
    group = dist.ProcessGroup(prefix, at, size)
    backend = FakeProcessGroup._create_internal(at, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    for device in (torch.device("cpu"), torch.device("cuda")):
        group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    groups._register(group, prefix, name, ranks)
    return group


def fake_groups(store, wanted, rank, *, prefix, **limits) -> dict[tuple[int, ...], dist.ProcessGroup]:
    return {
        ranks: fake_group(store, ranks, rank, name=f"{prefix}/{'-'.join(map(str, ranks))}", **limits)
        for ranks in wanted
        if rank in ranks
    }


def world_of(layout: str, generation: int):
    from liver_core.layout import Member, ParallelLayout, Roster
    from liver_core.worlds import megatron

    parsed = ParallelLayout.parse(layout)
    roster = Roster("job", generation, parsed, tuple(Member("a", slot) for slot in range(parsed.world_size)))
    with mock.patch.object(megatron, "make_group", fake_group), mock.patch.object(megatron, "make_groups", fake_groups):
        return megatron.bring_up(roster, 0, FakeStore(), host="127.0.0.1", timeout_s=10)


def job_of(precision: str):
    from liver_core.training.gpt import GptJob

    class OnDevice(GptJob):
        def samples(self, sample_ids):
            """As the reader gives them, on the device."""
            size = (len(sample_ids), SEQUENCE)
            whole = {name: torch.zeros(size, dtype=torch.int64, device=GPU) for name in ("tokens", "labels")}
            places = torch.arange(SEQUENCE, device=GPU).expand(size)
            return whole | {"position_ids": places, "loss_mask": torch.ones(size, device=GPU)}

    args = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4}
    args |= {"seq_length": SEQUENCE, "padded_vocab_size": 512, "precision": precision, "data_prefix": "/none"}
    return OnDevice(args, global_batch=16, micro_batch=2, seed=1)


def strays(mode_tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not on the device."""
    return sorted(name for name, tensor in mode_tensors.items() if tensor.device.type != "cuda")


def story(source: str, target: str, precision: str) -> dict[str, Any]:
    """Build, lay out and step one world; then build the next one and give it memory."""
    from liver_core.layout import ParallelLayout
    from liver_core.memory.memory_budget import DEPTH_LEAST, ring_bytes
    from liver_core.memory.memory_placement import areas
    from liver_core.state import megatron_optimizer as layer
    from liver_core.state.buckets import bucket_rule
    from liver_core.state.live_state import allocate
    from liver_core.state.optimizer_step import apply_step, measure_gradients
    from liver_core.streaming.ring import SourceRing
    from liver_core.training.job import MicroBatch
    from liver_core.worlds.megatron import activate, building, prepare_process, seed_streams
    from liver_core.worlds.released_storage import released

    prepare_process()
    job, found = job_of(precision), {}
    with PeakMemory("cuda") as memory:
        world = world_of(source, 1)
        activate(world)
        with building(world):
            state = job.build(world)
        inner = layer.distributed_optimizer(state.optimizer)
        parts = layer.describe_parameters(state.model, world)
        kinds = layer.discover_kinds(inner)
        manifest = layer.merge_manifest([parts], 4, kinds, bucket_rule(inner))
        live = layer.adopt(state.model, state.optimizer, manifest, world)
        scalars = {"step": torch.tensor(0.0)}
        layer.attach_moments(live, scalars)
        found["state"], found["trains"] = live.device_bytes, memory.now
        found["strays"] = strays(dict(live.regions) | dict(state.model.named_parameters()))
        before = memory.peak = memory.now
        seed_streams(world, seed=1, step=0)
        with HostReads() as reads:
            batches = [MicroBatch((0, 1)) for _ in range(MICRO_BATCHES)]
            job.step(state, world, batches)
            apply_step(state, measure_gradients(state))
        found["reads"], found["step"] = dict(reads.places), memory.peak - before
        before = memory.peak = memory.now
        following = world_of(target, 2)
        with HostReads() as reads:
            with building(following), released():
                built = job.build(following)
            with released():
                hollow = layer.adopt(built.model, built.optimizer, manifest, following)
            found["build"] = memory.peak - before
            found["allocated"] = allocate(hollow)
        found["build_reads"] = dict(reads.places)
        layout = ParallelLayout.parse(target)
        found["planned"] = sum(area.device_bytes for area in areas(manifest, layout, 0))
        ring = SourceRing(live.shards.region_numel, DEPTH_LEAST, version=0, device=GPU)
        found["ring"], found["ring_planned"] = ring.bytes, ring_bytes(live.shards.region_numel, DEPTH_LEAST)
        found["next_strays"] = strays(dict(hollow.regions) | dict(built.model.named_parameters()))
        found["whole"] = memory.now
    return found


def main() -> None:
    lend_device_guard()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        pretend(stack, mode)
        stack.enter_context(mode)
        print(json.dumps(story(*sys.argv[1:4])))


if __name__ == "__main__":
    main()
