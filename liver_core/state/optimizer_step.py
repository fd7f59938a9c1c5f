"""The optimizer step in the two parts between which a handoff happens: measure the gradients, then apply them.

The world that reduced the gradients computes the norm, once. The world that applies the step uses that norm and
Megatron's order of operations, so old and new world compute the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm

from liver_core.device import read
from liver_core.same_value import same_value
from liver_core.state.optimizer_chain import OptimizerChain, optimizer_chain
from liver_core.state.step_counts import UnsupportedState, counts_of, set_counts

if TYPE_CHECKING:
    from liver_core.training.job import TrainState


def start_norm(state: TrainState) -> torch.Tensor:
    """float32 [1] on the device that trains: the square of the gradient norm over the world (a collective of it).

    Megatron's `get_grad_norm` up to where it reads this number, without a wait of the host. Gradients do not change.
    """
    chain = optimizer_chain(state.optimizer)
    gradients: list[torch.Tensor] = []
    for part in chain.parts:
        part.prepare_grads()
        gradients += part.get_main_grads_for_grad_norm()
    squared = _local_norm(gradients, chain.buffers[0].grad_data.device) ** 2.0
    dist.all_reduce(squared, group=chain.stats_group())
    return squared


def norm_of(squared: float) -> float:
    """The norm, from the number that `start_norm` computes; in float64 on the host, as Megatron does it."""
    return squared**0.5


def measure_gradients(state: TrainState) -> float:
    """Total gradient norm over the world (a collective of it), read at once. Gradients do not change."""
    (squared,) = read(start_norm(state))
    return norm_of(squared)


def _local_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """float32 [1]: the norm of this rank's part, by the kernels that Megatron has found.

    Without Transformer Engine and Apex it has a stand-in that reads the norm of each parameter on the host. This one
    computes the same bits where the gradients are.
    """
    if not gradients:
        return torch.zeros(1, dtype=torch.float32, device=device)
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        return torch.norm(torch.stack([torch.norm(gradient) for gradient in gradients]).reshape(1, -1)).reshape(1)
    overflow = torch.zeros(1, dtype=torch.int, device=device)
    return clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)[0]


def apply_step(state: TrainState, grad_norm: float) -> None:
    """Clip by `grad_norm`, step the optimizer, gather the parameters, advance the schedule."""
    chain = optimizer_chain(state.optimizer)
    for part in chain.parts:
        part.prepare_grads()
        if part.config.clip_grad > 0.0:
            clip_grads.clip_grad_by_total_norm_fp32([*part.get_parameters()], part.config.clip_grad, grad_norm)
    chain.step()
    _gather_in_next_forward(state)
    if state.scheduler is not None:
        state.scheduler.step(increment=1)


def release_gradients(state: TrainState) -> None:
    """After the step of another world: free what a norm made of gradients that are not fp32, a copy of all of them."""
    if any(buffer.grad_dtype != torch.float32 for buffer in optimizer_chain(state.optimizer).buffers):
        state.optimizer.zero_grad()


def learning_rate(state: TrainState) -> float | None:
    """Of the first parameter group, as the next optimizer step uses it; None on a rank without any group."""
    groups = optimizer_chain(state.optimizer).groups
    return float(groups[0]["lr"]) if groups else None


def refresh_weights(state: TrainState) -> None:
    """Rebuild the model weights from the masters: copy each shard, then gather over data-parallel ranks."""
    with torch.no_grad():
        for part in optimizer_chain(state.optimizer).parts:
            part._copy_main_params_to_model_params()
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
    for group in (*state.model.bucket_groups, *state.model.expert_parallel_bucket_groups):
        group.param_gather_dispatched = False


# Megatron puts `step` into groups also where the class does not count there: when it loads a checkpoint.
_NOT_CONTENT = ("params", "lr", "weight_decay", "step")
BY_LAYOUT = "is_expert_parallel"
"""Whether a group's parameters are cut over experts: with EP1 none is."""


def hyper_parameters(state: TrainState) -> list[dict[str, Any]]:
    """Learning rate and weight decay of each parameter group, keyed by the group's content, not by its index; and, of
    a class that counts in its groups, these `counts`. By key, and groups of one key once."""
    return group_values(optimizer_chain(state.optimizer))


def group_values(chain: OptimizerChain) -> list[dict[str, Any]]:
    """`hyper_parameters` of a rank's optimizers. Raises UnsupportedState where two groups of one key differ."""
    counted = chain.form.counted
    found: dict[str, dict[str, Any]] = {}
    for group in chain.groups:
        key = group_key(group, counted)
        value = {"key": key, "lr": group["lr"], "weight_decay": group["weight_decay"]}
        value |= {"counts": counts_of(group, counted)} if counted else {}
        if not same_value(found.setdefault(key, value), value):
            raise UnsupportedState(f"parameter groups of the same settings, {key}: {found[key]} and {value} differ")
    return [found[key] for key in sorted(found)]


def set_hyper_parameters(state: TrainState, groups: list[dict[str, Any]]) -> None:
    """Set learning rate, weight decay and counts. Raises KeyError naming a group that the other world did not have."""
    known = {everywhere(group["key"]): group for group in groups}
    chain = optimizer_chain(state.optimizer)
    counted = chain.form.counted
    for group in chain.groups:
        key = group_key(group, counted)
        if key not in known:
            raise KeyError(f"no hyper-parameters for the parameter group {key}; the other world had {sorted(known)}")
        group["lr"], group["weight_decay"] = known[key]["lr"], known[key]["weight_decay"]
        set_counts(group, known[key].get("counts", {}), counted)


def group_key(group: Mapping[str, Any], counted: Collection[str]) -> str:
    """What a group is known by in every world: its settings, without what a schedule sets, a step changes or a layout
    decides."""
    left_out = {*_NOT_CONTENT, BY_LAYOUT, *counted}
    return ";".join(f"{key}={group[key]!r}" for key in sorted(group) if key not in left_out)


def everywhere(key: str) -> str:
    """The key of a group from a checkpoint of an older release, which said where the layout had put it."""
    return ";".join(part for part in key.split(";") if not part.startswith(f"{BY_LAYOUT}="))
