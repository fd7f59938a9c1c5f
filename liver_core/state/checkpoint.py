"""Megatron distributed checkpoints of a job, written in the background, loaded into any layout.

The checkpoint rung of the ladder. Uses Megatron's own `dist_checkpointing` in its fully reshardable format on both
ways, so it shares no mapping with the live path: tests use it as the oracle. Writing: a snapshot is taken at a boundary
in the main thread, files are written by a thread on a group of its own, a complete checkpoint appears by one rename.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from liver_core.state.live_state import LiveState
from liver_core.state.megatron_optimizer import (
    attach_moments,
    distributed_optimizer,
    probe_scalars,
    readopt_moments,
    unwrapped,
)
from liver_core.state.optimizer_step import gather_weights
from liver_core.training.job import TrainState
from liver_core.worlds.groups import default_group
from liver_core.worlds.megatron import MegatronWorld

SMALL_STATE_FILE = "liver_small_state.json"
COMPLETE_FILE = "metadata.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the text names the path and the rule."""


def _metadata(world: MegatronWorld) -> dict[str, Any]:
    return {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": world.collection.dp_cp}


def snapshot(world: MegatronWorld, state: TrainState) -> dict[str, Any]:
    """The sharded state dict at this boundary with every tensor copied: training may go on while it is written.

    A collective of the world: weights and optimizer state are gathered over data-parallel ranks. Main thread only.
    """
    gather_weights(state)
    module = unwrapped(state.model)
    model = module.sharded_state_dict(metadata=_metadata(world))
    optimizer = _sharded_optimizer(distributed_optimizer(state.optimizer), model, world)
    copied: Any = dict_list_map_inplace(_copied, {"model": model, "optimizer": optimizer})
    return copied


def _sharded_optimizer(optimizer: Any, model: dict[str, Any], world: MegatronWorld, **how: Any) -> Any:
    """Megatron's own description around a defect of megatron-core 0.16.1 with several buckets: optimizer state is
    gathered without the padding at the ends of buckets, and then looked up at places that count it, so that all
    parameters behind the first padding are shifted. Meanwhile padding counts as elements here."""
    parts = [part for buffer in optimizer.buffers for part in (buffer, *buffer.buckets)]
    counted = [part.numel_unpadded for part in parts]
    try:
        for part in parts:
            part.numel_unpadded = part.grad_data.numel()
        return optimizer.sharded_state_dict(model, metadata=_metadata(world), **how)
    finally:
        for part, numel in zip(parts, counted, strict=True):
            part.numel_unpadded = numel


def _copied(value: Any) -> Any:
    if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None:
        return replace(value, data=value.data.detach().clone())
    return value


def write(sharded: dict[str, Any], small: Mapping[str, Any], path: str, group: dist.ProcessGroup) -> None:
    """Write a snapshot to `path`, all ranks of `group` together; complete or absent, never half there.

    Safe in a background thread: this thread's default group is `group` while it runs.
    """
    target, partial = Path(path), Path(f"{path}.partial")
    # The stock queue belongs to a spawned manager process per rank: a second import of everything, 6 s and 236 MB.
    filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]
    with default_group(group):
        if group.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier(group=group)
        dist_checkpointing.save(sharded, str(partial))
        if group.rank() == 0:
            (partial / SMALL_STATE_FILE).write_text(json.dumps(small))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
        dist.barrier(group=group)


def read_small_state(path: str) -> dict[str, Any]:
    """The small state of a complete checkpoint. Raises CheckpointError where there is none."""
    folder = Path(path)
    for name in (COMPLETE_FILE, SMALL_STATE_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing, so it is not a complete checkpoint")
    return json.loads((folder / SMALL_STATE_FILE).read_text())


def load_checkpoint(path: str, world: MegatronWorld, state: TrainState, live: LiveState) -> dict[str, Any]:
    """Load masters, moments and weights of `path` into a world of any layout. Returns the small state.

    A collective of `world`; call under `building(world)` or when it is active.
    """
    small = read_small_state(path)
    optimizer = distributed_optimizer(state.optimizer)
    module = unwrapped(state.model)
    if not optimizer.optimizer.state:
        # Upstream cannot describe an optimizer that never stepped.
        attach_moments(live, probe_scalars(optimizer))
    model = module.sharded_state_dict(metadata=_metadata(world))
    wanted = {
        "model": model,
        "optimizer": _sharded_optimizer(optimizer, model, world, is_loading=True),
    }
    try:
        loaded: Any = dist_checkpointing.load(wanted, path)
    except (Exception, CheckpointException) as error:
        # Megatron raises whatever its strategies and torch raise; what a user must know is which checkpoint it was.
        raise CheckpointError(f"checkpoint {path}: {error_text(error)}") from error
    module.load_state_dict(loaded["model"])
    _load_optimizer(optimizer, loaded["optimizer"])
    readopt_moments(live)
    return small


def error_text(error: BaseException) -> str:
    """Kind and text of an error; torch's CheckpointException, which is no Exception, wraps those of the ranks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {error_text(wrapped[0])}" for rank, wrapped in error.failures.items())
    return f"{type(error).__name__}: {error}"


def _load_optimizer(optimizer: Any, loaded: dict[str, Any]) -> None:
    """Megatron's own loader around two defects with torch's optimizers (megatron-core 0.16.1 and 0.19.2):
    it asks the loaded tensors for "step", and leaves one `step` tensor shared by all parameters."""
    original = optimizer._set_main_param_and_optimizer_states

    def with_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        held = scalars_of(optimizer.optimizer.param_groups[group]["params"][order])
        original(model_param, {**held, **tensors})

    def scalars_of(main: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: value for name, value in optimizer.optimizer.state[main].items() if value.dim() == 0}

    optimizer._set_main_param_and_optimizer_states = with_step
    try:
        optimizer.load_state_dict(loaded)
    finally:
        del optimizer._set_main_param_and_optimizer_states
    for values in optimizer.optimizer.state.values():
        for name, value in values.items():
            if torch.is_tensor(value) and value.dim() == 0:
                values[name] = value.detach().clone()


def prune(folder: Path, keep: int) -> None:
    """Remove the oldest complete checkpoints beyond `keep`; anything not of our making is left alone."""
    complete = sorted(entry for entry in folder.glob("step-*") if (entry / SMALL_STATE_FILE).is_file())
    for old in complete[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
