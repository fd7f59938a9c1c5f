"""The optimizers of a chain in a checkpoint that a world with another chain can load.

Megatron loads a checkpoint into the same number of optimizers only. The keys of its tensors do not depend on that, so
each optimizer asks for those of its own parameters. One of the few places that import Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from liver_core.state.checkpoint_files import CheckpointError
from liver_core.state.optimizer_chain import OptimizerChain
from liver_core.state.optimizer_step import BY_LAYOUT

ANY_LAYOUT = "fully_reshardable"


def sharded_optimizers(
    chain: OptimizerChain, model: dict[str, Any], metadata: dict[str, Any], **how: Any
) -> dict[int, Any]:
    """Of each part, by its number in Megatron's chain. Keys of state that is not cut by parameters begin with it, as
    Megatron writes them, where there are several."""
    found = {chain.number_of(part): _sharded_optimizer(part, model, metadata, **how) for part in chain.parts}
    if metadata["distrib_optim_sharding_type"] != ANY_LAYOUT and chain.is_of_several:
        for number, part in found.items():
            add_prefix_for_sharding(part, f"chained_{number}.")
    return found


def _sharded_optimizer(optimizer: Any, model: dict[str, Any], metadata: dict[str, Any], **how: Any) -> Any:
    """Megatron's own description, with a workaround for megatron-core 0.16.1 and several buckets.

    Megatron gathers optimizer state without the padding at the ends of buckets, but looks it up at offsets that count
    the padding. All parameters after the first padding are then shifted. The workaround counts padding as elements.
    """
    any_layout = metadata["distrib_optim_sharding_type"] == ANY_LAYOUT
    parts = [part for buffer in optimizer.buffers for part in (buffer, *buffer.buckets)] if any_layout else []
    counted = [part.numel_unpadded for part in parts]
    # A group of ours has gloo for host memory, whatever it has for devices.
    optimizer.data_parallel_group_gloo = optimizer.data_parallel_group
    try:
        for part in parts:
            part.numel_unpadded = part.grad_data.numel()
        if any_layout and not optimizer.optimizer.state:
            # This rank owns nothing of it, which Megatron cannot describe, and takes part in its collectives.
            tensors = optimizer.sharded_param_state_fully_reshardable(model, metadata=metadata, **how)
            return {**_groups_of(optimizer), "param_state": tensors, "param_state_sharding_type": ANY_LAYOUT}
        return optimizer.sharded_state_dict(model, metadata=metadata, **how)
    finally:
        for part, numel in zip(parts, counted, strict=True):
            part.numel_unpadded = numel


def _groups_of(optimizer: Any) -> dict[str, Any]:
    """The parameter groups of an optimizer without state, as Megatron writes them; they count nothing."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"optimizer": {"param_groups": groups}}


def load_optimizers(chain: OptimizerChain, parts: Mapping[int, Any], written: Mapping[Any, Any], sharding: str) -> None:
    """Into each part what it asked for, of this `sharding`; their parameter groups are those that were `written`, of
    whichever optimizer. Raises CheckpointError where there is none of a group's settings."""
    for part in chain.parts:
        loaded = {**parts[chain.number_of(part)], "param_state_sharding_type": sharding}
        # dp_reshardable has the groups with the tensors.
        whole = loaded if "optimizer" in loaded else {**_groups_for(part, written), **loaded}
        if part.optimizer.state:
            load_optimizer(part, whole)
            continue
        for group, found in zip(part.optimizer.param_groups, whole["optimizer"]["param_groups"], strict=True):
            group.update(found)


def _groups_for(part: Any, written: Mapping[Any, Any]) -> dict[str, Any]:
    chain = [written] if "optimizer" in written else list(written.values())
    theirs = {_identity(group): group for each in chain for group in each["optimizer"]["param_groups"]}
    ours = part.optimizer.param_groups
    if missing := [name for group in ours if (name := _identity(group)) not in theirs]:
        raise CheckpointError(f"no parameter group with {missing[0]} is there; it has {'; '.join(theirs)}")
    groups = [{**theirs[_identity(group)], BY_LAYOUT: group[BY_LAYOUT]} for group in ours]
    return {**chain[0], "optimizer": {**chain[0]["optimizer"], "param_groups": groups}}


def _identity(group: Mapping[str, Any]) -> str:
    """What Megatron knows a group by, in every layout. NeMo's checkpoints have other names for it."""
    names = [name for name in param_group_identifier_keys if name != BY_LAYOUT]
    return ", ".join(f"{name} {group.get(name, group.get(f'pre_{name}'))}" for name in names)


def load_optimizer(optimizer: Any, loaded: dict[str, Any]) -> None:
    """Megatron's own loader, with workarounds for torch's optimizers (megatron-core 0.16.1 and 0.19.2).

    Megatron's loader expects "step" among the loaded tensors, and it leaves all parameters sharing one `step` tensor.
    """
    original = optimizer._set_main_param_and_optimizer_states

    def with_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        scalars = scalars_of(optimizer.optimizer.param_groups[group]["params"][order])
        original(model_param, {**tensors, **scalars})

    def scalars_of(main: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: value for name, value in optimizer.optimizer.state[main].items() if value.dim() == 0}

    optimizer._set_main_param_and_optimizer_states = with_step
    try:
        with torch.no_grad():
            # Its reader of dp_reshardable writes into parameters without saying so.
            optimizer.load_state_dict(loaded)
    finally:
        del optimizer._set_main_param_and_optimizer_states
    for values in optimizer.optimizer.state.values():
        for name, value in values.items():
            if torch.is_tensor(value) and value.dim() == 0:
                values[name] = value.detach().clone()
