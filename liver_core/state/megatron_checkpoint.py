"""A checkpoint that Megatron-LM's own training wrote (`--save`, `torch_dist`): what a job must be to go on from it.

Tensors are loaded as those of our own checkpoints are. What differs is beside them: how the optimizer state is cut,
where the step stands, and a schedule that counts samples. What would change the training silently is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from liver_core.layout import ParallelLayout
from liver_core.layout.experts import layers_with_experts
from liver_core.state.checkpoint_files import MEGATRON_FILES, THEIRS, CheckpointError
from liver_core.state.kept_settings import keeping_settings, schedule_refusal
from liver_core.state.live_state import LiveState
from liver_core.state.megatron_arguments import megatron_arguments
from liver_core.state.megatron_export import COUNTED_IN_SAMPLES, SCHEDULE
from liver_core.state.megatron_optimizer import element_scalars, unwrapped
from liver_core.state.optimizer_chain import optimizer_chain
from liver_core.state.optimizer_checkpoint import ANY_LAYOUT
from liver_core.state.optimizer_step import hyper_parameters
from liver_core.training.job import TrainingJob, TrainState
from liver_core.worlds.megatron import MegatronWorld

ANY_DP = "dp_reshardable"
FREQUENCY = "moe_layer_freq"
# Megatron's arguments that say what the model is.
OF_ANY_PRECISION = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("padded_vocab_size", "normalization", "norm_epsilon", "apply_layernorm_1p", "qk_layernorm"),
    *("position_embedding_type", "rotary_percent", "rotary_base", "rotary_interleaved"),
    *("add_bias_linear", "add_qkv_bias", "swiglu", "squared_relu", "quick_geglu"),
    *("untie_embeddings_and_output_weights", "multi_latent_attention", "num_experts", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", FREQUENCY, "moe_router_topk", "moe_router_score_function"),
    *("moe_router_enable_expert_bias", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_gate", "moe_expert_capacity_factor"),
)
OF_THE_MODEL = (*OF_ANY_PRECISION, "bf16", "fp16")


def model_refusal(theirs: Mapping[str, Any], ours: Mapping[str, Any], names: Iterable[str] = OF_THE_MODEL) -> str:
    """The first of these arguments that says that a checkpoint is of another model than the job's. Empty if none."""
    for name in names:
        if name == FREQUENCY and _layers(theirs) == _layers(ours):
            continue
        # An argument that is not given is None there; a setting that the job's model does not have is absent here.
        if name in theirs and theirs[name] != (present := ours.get(name)) and (theirs[name] or present is not None):
            return f"{name} is {theirs[name]!r} there and {present!r} in the job's model; must be equal"
    return ""


def _layers(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which have experts, whichever way it is said."""
    return layers_with_experts(arguments.get(FREQUENCY) or 1, arguments.get("num_layers") or 0)


@dataclass(frozen=True, slots=True)
class MegatronCheckpoint:
    """What stands in `common.pt`. `arguments`: those of Megatron's training."""

    path: str
    iteration: int
    arguments: Mapping[str, Any]
    content: Mapping[str, Any]
    schedule: Mapping[str, Any]

    @property
    def sharding(self) -> str:
        return self.content["distrib_optim_sharding_type"]

    @property
    def advice(self) -> str:
        """What to look at when Megatron's loader refuses it."""
        if self.sharding == ANY_LAYOUT:
            return ""
        return f"; with {ANY_DP}, gradient buckets must be those that it was written with (ddp in the job file)"

    def metadata(self, world: MegatronWorld) -> dict[str, Any]:
        """What Megatron describes state dicts by, as they were when this was written."""
        return {**self.content, "dp_cp_group": world.collection.dp_cp}

    def check(self, job: TrainingJob, state: TrainState, world: MegatronWorld) -> None:
        """Raise CheckpointError, with field and rule, if this job cannot go on from it."""
        self._check_model(megatron_arguments(job, state, world))
        if state.scheduler is not None:
            self._check_schedule(state.scheduler, job)

    def _check_model(self, ours: Mapping[str, Any]) -> None:
        theirs = dict(self.arguments)
        if not theirs.get("group_query_attention"):
            theirs["num_query_groups"] = theirs.get("num_attention_heads")
        if refusal := model_refusal(theirs, ours):
            raise _refused(self.path, refusal)

    def check_layout(self, layout: ParallelLayout) -> None:
        """Raise CheckpointError, with the rule, if its optimizer state cannot be cut to this layout."""
        if self.sharding == ANY_LAYOUT:
            return
        theirs = [self.arguments.get(f"{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline")]
        ours, named = [layout.tp, layout.pp], "TP{}xPP{}"
        if self.arguments.get("num_experts"):
            etp = self.arguments.get("expert_tensor_parallel_size") or theirs[0]
            theirs += [self.arguments.get("expert_model_parallel_size") or 1, etp]
            ours, named = [*ours, layout.ep, layout.expert_tp], named + "xEP{}xETP{}"
        if theirs != ours or self.arguments.get("virtual_pipeline_model_parallel_size"):
            raise _refused(
                self.path,
                f"its optimizer state is {ANY_DP}, so it loads only in {named.format(*theirs)} without virtual "
                f"stages, in any DP, and not in {layout}; allow only such layouts, or write it with "
                "--dist-ckpt-optim-fully-reshardable",
            )

    def _check_schedule(self, scheduler: Any, job: TrainingJob) -> None:
        if not isinstance(scheduler, OptimizerParamScheduler):
            raise _refused(
                self.path,
                f"scheduler: {type(scheduler).__name__} does not take the state of Megatron's; build an "
                "OptimizerParamScheduler in the job, or no scheduler for the rates that stand there",
            )
        if refusal := schedule_refusal(self._schedule_of(job), scheduler):
            raise _refused(self.path, refusal)

    def _schedule_of(self, job: TrainingJob) -> dict[str, Any]:
        """Counted in steps of this job."""
        found = {name: self.schedule[name] for name in SCHEDULE}
        for name in COUNTED_IN_SAMPLES:
            steps, rest = divmod(found[name], job.global_batch)
            found[name] = found[name] / job.global_batch if rest else steps
        return found

    def small_state(self, job: TrainingJob, state: TrainState, live: LiveState) -> dict[str, Any]:
        """As our own checkpoints have it. The tensors must be loaded."""
        return {
            "step": self.iteration,
            "consumed_samples": self.arguments["consumed_train_samples"],
            "sample_digest": 0,
            "scheduler": None if state.scheduler is None else self._schedule_of(job),
            "hyper_parameters": hyper_parameters(state),
            "element_scalars": element_scalars(live),
            "job": dict(job.small_state(state)),
        }

    @contextmanager
    def loading_optimizer(self, state: TrainState) -> Iterator[None]:
        """Around the load of the optimizer, when the weights are loaded: keeps the job's settings, and compares masters
        with weights."""
        weights = {name: value.detach().cpu().clone() for name, value in unwrapped(state.model).named_parameters()}
        with keeping_settings(state):
            yield
        with torch.no_grad():
            for part in optimizer_chain(state.optimizer).parts:
                part._copy_main_params_to_model_params()
        for name, value in unwrapped(state.model).named_parameters():
            if not torch.equal(value.detach().cpu(), weights[name]):
                raise _refused(
                    self.path,
                    f"the fp32 master of {name} is not the one of its weight. Megatron-Core 0.16.1 writes "
                    f"{ANY_LAYOUT} optimizer state shifted where gradient buckets are padded (--overlap-grad-reduce); "
                    f"write it with {ANY_DP}, or without --overlap-grad-reduce",
                )


def read_megatron_checkpoint(path: str) -> MegatronCheckpoint | None:
    """None if the folder is not one of Megatron's training. Raises CheckpointError if it is, but cannot be loaded."""
    folder = Path(path)
    if not folder.name.startswith(THEIRS):
        return None
    _check_files(folder)
    try:
        common = load_common_state_dict(path)
    except Exception as error:
        # Megatron and pickle raise many kinds. A person needs to know which file it was.
        raise _refused(path, f"common.pt cannot be read: {type(error).__name__}: {error}") from error
    arguments = vars(common["args"]) if "args" in common else {}
    if "consumed_train_samples" not in arguments or "iteration" not in common:
        raise _refused(path, "common.pt has no iteration and consumed_train_samples, so training did not write it")
    if common["iteration"] != int(folder.name.removeprefix(THEIRS)):
        raise _refused(path, f"iteration is {common['iteration']} there; the folder must have its name")
    if arguments.get("no_save_optim") or "opt_param_scheduler" not in common:
        raise _refused(path, "has no optimizer state; write it without --no-save-optim")
    if not arguments.get("use_distributed_optimizer"):
        raise _refused(path, "use_distributed_optimizer is off there; write it with --use-distributed-optimizer")
    content = dict(common.get("content_metadata") or {})
    if (sharding := content.get("distrib_optim_sharding_type")) not in (ANY_LAYOUT, ANY_DP):
        raise _refused(
            path, f"distrib_optim_sharding_type is {sharding}; must be {ANY_LAYOUT} or {ANY_DP}: load and save it with "
            "Megatron-Core 0.14 or newer"
        )  # fmt: skip
    return MegatronCheckpoint(path, common["iteration"], arguments, content, common["opt_param_scheduler"])


def _check_files(folder: Path) -> None:
    if any(folder.glob("mp_rank_*")):
        raise _refused(str(folder), "ckpt_format is torch; write it with --ckpt-format torch_dist")
    for name in MEGATRON_FILES:
        if not (folder / name).is_file():
            raise _refused(str(folder), f"{name} is missing, so it is not a complete checkpoint of torch_dist")


def _refused(path: str, rule: str) -> CheckpointError:
    return CheckpointError(f"start_from {path}: {rule}")
