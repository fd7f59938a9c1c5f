"""Settings of Megatron under which state lies where it is not looked for, or may not be moved. Pure: only values are
looked at, so that recipes can be checked where no model is built."""

from __future__ import annotations

from typing import Any

_Refused = dict[str, tuple[object, str]]
_OPTIMIZER: _Refused = {
    "use_precision_aware_optimizer": (False, "masters and moments must be fp32; set it to False"),
    "optimizer_cpu_offload": (False, "masters and moments must lie on the device; set it to False"),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, "weights would overwrite the gradients that move; set it to False"),
    "overlap_param_gather_with_optimizer_step": (False, "it gives each model chunk an optimizer; set it to False"),
}
_DDP: _Refused = {
    "nccl_ub": (False, "its buffers are registered with NCCL and cannot be given back; set it to False"),
    "fp8_param_gather": (False, "weights must be bf16 or fp32; set it to False"),
    "use_megatron_fsdp": (False, "its parameters are in no buffers of DDP; set it to False"),
    "num_distributed_optimizer_instances": (1, "shards are copied over instances; set it to 1"),
}
_MODEL: _Refused = {
    "fp8_param": (False, "weights must be bf16 or fp32; set it to False"),
    "fp4_param": (False, "weights must be bf16 or fp32; set it to False"),
    "cuda_graph_impl": ("none", "a graph keeps addresses and groups of its world; set it to 'none'"),
    "enable_cuda_graph": (False, "a graph keeps addresses and groups of its world; set it to False"),
    "external_cuda_graph": (False, "a graph keeps addresses and groups of its world; set it to False"),
    "tp_comm_overlap": (False, "its buffers exist once in a process, which has two worlds; set it to False"),
    "moe_use_legacy_grouped_gemm": (False, "it packs the experts of a rank in one tensor; set it to False"),
    "virtual_pipeline_model_parallel_size": (1, "interleaved stages are not moved yet; set it to None"),
    "context_parallel_size": (1, "a sequence is not cut over ranks yet; set it to 1"),
    "mtp_num_layers": (0, "its copy of the embedding is not moved yet; set it to None"),
}
"""Setting -> the value that is allowed, and why and what else."""

_STAGES: _Refused = {
    name: (value, "stages must have equally many layers; set it to its default")
    for name, value in (
        ("pipeline_model_parallel_layout", None),
        ("num_layers_in_first_pipeline_stage", None),
        ("num_layers_in_last_pipeline_stage", None),
        ("account_for_embedding_in_pipeline_split", False),
        ("account_for_loss_in_pipeline_split", False),
    )
}
"""The same, where there are several stages."""


def refusals(optimizer: Any, ddp: Any, model: Any) -> dict[str, str]:
    """Each setting of Megatron's three configurations that does not go with a handoff, and why. A setting that a
    configuration does not have, and one that is None, says nothing."""
    stages = _STAGES if (getattr(model, "pipeline_model_parallel_size", 1) or 1) > 1 else {}
    found = {}
    for settings, refused in ((optimizer, _OPTIMIZER), (ddp, _DDP), (model, _MODEL), (model, stages)):
        for name, (without, instead) in refused.items():
            value = getattr(settings, name, without)
            if value is not None and value != without:
                shown = getattr(value, "value", value)
                found[name] = f"is {shown!r}; a live world cannot be handed over with it: {instead}"
    if getattr(model, "moe_single_grouped_weight", False):  # Megatron-Core 0.16.1 has no such setting yet.
        found["moe_single_grouped_weight"] = "is True; it packs the experts of a rank in one tensor: set it to False"
    if getattr(model, "moe_token_dispatcher_type", None) == "flex":
        found["moe_token_dispatcher_type"] = (
            "is 'flex'; its buffer belongs to the groups of one world: use 'alltoall' or 'allgather'"
        )
    recipe = getattr(model, "fp8_recipe", None)
    if getattr(model, "fp8", None) and getattr(recipe, "value", recipe) == "delayed":
        found["fp8_recipe"] = (
            "is 'delayed'; its histories of maxima are state that no other world would have: "
            "use fp8_recipe 'tensorwise', 'blockwise' or 'mxfp8'"
        )
    return found
