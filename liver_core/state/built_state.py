"""Whether what a job's `build` returned can be trained and handed over: looked at each time, before anything uses it.

A job that forgets one of these would train on with wrong numbers, or fail later with a message about something else.
"""

from __future__ import annotations

from typing import Any

from liver_core.layout import ParallelLayout
from liver_core.same_value import same_value
from liver_core.state.megatron_optimizer import model_and_main, unwrapped
from liver_core.state.optimizer_chain import optimizer_chain
from liver_core.state.optimizer_step import group_key
from liver_core.state.step_counts import UnsupportedState
from liver_core.state.step_tensors import is_step_tensor
from liver_core.training.job import TrainState
from liver_core.training.unsupported_settings import refusals
from liver_core.worlds.megatron import MegatronWorld, split_parameters

_FINISH_BUILD = "liver_core.training.megatron_job.finish_build does it"


def check_built(state: Any, world: MegatronWorld) -> TrainState:
    """The state itself. Raises UnsupportedState naming the rule and what to change."""
    if not isinstance(state, TrainState):
        raise UnsupportedState(
            f"build returned {_kind(state)}; it must return a liver_core.training.job.TrainState of model, optimizer, "
            "scheduler and config"
        )
    if not hasattr(state.model, "bucket_groups"):
        raise UnsupportedState(
            f"model: build returned {_kind(state.model)}; it must be wrapped in Megatron's DistributedDataParallel; "
            f"{_FINISH_BUILD}"
        )
    for name in ("step", "state_dict", "load_state_dict"):
        if state.scheduler is not None and not callable(getattr(state.scheduler, name, None)):
            raise UnsupportedState(
                f"scheduler: {_kind(state.scheduler)} has no {name}; it needs step(increment), state_dict and "
                "load_state_dict, or must be None"
            )
    _check_settings(state)
    _check_trained(unwrapped(state.model))
    _check_buffers(unwrapped(state.model))
    _check_marks(state)
    check_groups(state)
    if world.layout.pp > 1 and tied_embeddings(state):
        raise UnsupportedState(
            f"share_embeddings_and_output_weights: tied embeddings do not run with PP above 1 (layout {world.layout}); "
            "build with share_embeddings_and_output_weights=False, or allow layouts with PP1 only"
        )
    check_sequence(state.config, world.layout)
    return state


def check_sequence(config: Any, layout: ParallelLayout) -> None:
    """Megatron refuses this in the first forward pass only, which is too late for a handoff."""
    if layout.tp > 1 and getattr(config, "num_moe_experts", None) and not config.sequence_parallel:
        raise UnsupportedState(
            f"sequence_parallel: is off, and Megatron trains experts with TP above 1 (layout {layout}) only with it; "
            "build with sequence_parallel=True where TP is above 1, or allow layouts with TP1 only"
        )


def tied_embeddings(state: TrainState) -> bool:
    """Whether the output layer uses the embedding's weights."""
    return bool(getattr(unwrapped(state.model), "share_embeddings_and_output_weights", False))


def _check_settings(state: TrainState) -> None:
    parts = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
    optimizer = getattr(parts[0], "config", None)
    for name, why in refusals(optimizer, state.model.ddp_config, state.config).items():
        raise UnsupportedState(f"{name}: {why}")


def _check_trained(model: Any) -> None:
    """Megatron gives a parameter without a gradient no place in its buffers, where LiveR looks for it."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise UnsupportedState(
            f"parameter {frozen[0]}: is frozen (requires_grad=False), one of {len(frozen)} such; frozen parameters are "
            "not moved yet, all must be trained"
        )


def _check_buffers(model: Any) -> None:
    """What a module keeps beside its parameters is made anew by each build: a handoff carries only what Megatron's
    routers have, and change in each step."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not is_step_tensor(module, name):
                raise UnsupportedState(
                    f"buffer {path + '.' if path else ''}{name}: is persistent, of shape {tuple(buffer.shape)}; a next "
                    "world would not have what steps write into it. Register it with persistent=False if build makes "
                    "it anew each time; what steps change can go through small_state and load_small_state"
                )


def _check_marks(state: TrainState) -> None:
    """Megatron counts a parameter without the mark on the first tensor-parallel rank only: the gradient norm would be
    too small, and clipping other than it should be."""
    for name, parameter, _ in split_parameters(unwrapped(state.model)):
        if not _marked(parameter):
            raise UnsupportedState(
                f"parameter {name}: is split over tensor-parallel ranks, but not marked so, and the gradient norm "
                "would come out wrong; call liver_core.worlds.megatron.mark_tensor_parallel(model) before "
                f"DistributedDataParallel ({_FINISH_BUILD})"
            )
    both = (pair for part in optimizer_chain(state.optimizer).parts for pair in model_and_main(part))
    for parameter, shard in both:
        if _marked(parameter) and not _marked(shard):
            raise UnsupportedState(
                "optimizer: was made before the parameters were marked as tensor parallel, and the gradient norm would "
                "come out wrong; call mark_tensor_parallel(model) before get_megatron_optimizer "
                f"({_FINISH_BUILD})"
            )


def check_groups(state: TrainState) -> None:
    """A group is known by its settings in every world. Raises UnsupportedState where two could be taken for one."""
    rates: dict[str, tuple[Any, Any]] = {}
    for group in optimizer_chain(state.optimizer).groups:
        here = group["lr"], group["weight_decay"]
        if not same_value(there := rates.setdefault(group_key(group, ()), here), here):
            raise UnsupportedState(
                f"parameter groups: two have the same settings and other rates, (lr, weight_decay) {there} and {here}; "
                "the next world could not tell them apart: give one of them a setting of its own, as wd_mult or lr_mult"
            )


def _marked(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
