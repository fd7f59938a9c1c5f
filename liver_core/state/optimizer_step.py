"""The optimizer step in the two parts between which a handoff happens: measure the gradients, then apply them.

The world that reduced the gradients computes the norm, once. The world that applies the step uses that norm and
Megatron's order of operations, so old and new world compute the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from liver_core.state.megatron_optimizer import distributed_optimizer

if TYPE_CHECKING:
    from liver_core.training.job import TrainState


def measure_gradients(state: TrainState) -> float:
    """Total gradient norm over the world (a collective of it). Gradients do not change."""
    optimizer = distributed_optimizer(state.optimizer)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def apply_step(state: TrainState, grad_norm: float) -> None:
    """Clip by `grad_norm`, step the optimizer, gather the parameters, advance the schedule."""
    optimizer = distributed_optimizer(state.optimizer)
    optimizer.prepare_grads()
    if optimizer.config.clip_grad > 0.0:
        clip_grad_by_total_norm_fp32([*optimizer.get_parameters()], optimizer.config.clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
    _gather_in_next_forward(state)
    if state.scheduler is not None:
        state.scheduler.step(increment=1)


def learning_rate(state: TrainState) -> float | None:
    """Of the first parameter group, as the next optimizer step uses it; None on a rank without any group."""
    groups = distributed_optimizer(state.optimizer).optimizer.param_groups
    return float(groups[0]["lr"]) if groups else None


def refresh_weights(state: TrainState) -> None:
    """Rebuild the model weights from the masters: copy each shard, then gather over data-parallel ranks."""
    optimizer = distributed_optimizer(state.optimizer)
    with torch.no_grad():
        optimizer._copy_main_params_to_model_params()
        state.model.start_param_sync(force_sync=True)


def gather_weights(state: TrainState) -> None:
    """Gather the model weights now, for a reader between two steps. A collective of the data-parallel ranks.

    With overlap_param_gather, a rank has only its own part of them between a step and the next forward pass.
    """
    if state.model.ddp_config.overlap_param_gather:
        state.model.start_param_sync(force_sync=True)


def _gather_in_next_forward(state: TrainState) -> None:
    """With overlap_param_gather: make the next forward pass gather the weights that this step changed.

    Megatron does so by itself, unless something (a checkpoint, the start of a world) gathered between the reduction of
    the gradients and the step. Then Megatron's flag would still mark the weights from before the step as gathered.
    """
    for group in state.model.bucket_groups:
        group.param_gather_dispatched = False


# Megatron puts `step` into groups only when it loads a checkpoint. The true one is in the element state.
_NOT_CONTENT = ("params", "lr", "weight_decay", "step")


def hyper_parameters(state: TrainState) -> list[dict[str, Any]]:
    """Learning rate and weight decay of each parameter group, keyed by the group's content, not by its index."""
    groups = distributed_optimizer(state.optimizer).optimizer.param_groups
    return [{"key": _content(group), "lr": group["lr"], "weight_decay": group["weight_decay"]} for group in groups]


def set_hyper_parameters(state: TrainState, groups: list[dict[str, Any]]) -> None:
    """Set learning rate and weight decay. Raises KeyError naming a group that the other world did not have."""
    known = {group["key"]: group for group in groups}
    for group in distributed_optimizer(state.optimizer).optimizer.param_groups:
        key = _content(group)
        if key not in known:
            raise KeyError(f"no hyper-parameters for the parameter group {key}; the other world had {sorted(known)}")
        group["lr"], group["weight_decay"] = known[key]["lr"], known[key]["weight_decay"]


def _content(group: Mapping[str, Any]) -> str:
    return ";".join(f"{key}={group[key]!r}" for key in sorted(group) if key not in _NOT_CONTENT)
