"""What a job's model, optimizer and layout are in Megatron's own training arguments, as plain JSON.

Read from the live objects, so it is true of any job. Written with each checkpoint, because `liver jobs export` has no
model to ask: Megatron takes the shape of the model from the arguments that its checkpoints hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.activations import quick_gelu, squared_relu

from liver_core.state.megatron_optimizer import unwrapped
from liver_core.state.optimizer_chain import optimizer_chain
from liver_core.training.job import TrainingJob, TrainState
from liver_core.worlds.megatron import MegatronWorld

# (name here, name in Megatron's arguments) of what a config, an optimizer's config, a GPTModel and a layout say.
IN_CONFIG = (
    *((name, name) for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")),
    *((name, name) for name in ("num_query_groups", "kv_channels", "normalization", "rotary_interleaved")),
    *((name, name) for name in ("add_bias_linear", "add_qkv_bias", "apply_query_key_layer_scaling")),
    *((name, name) for name in ("attention_dropout", "hidden_dropout", "bf16", "fp16")),
    *((name, name) for name in ("qk_layernorm", "attention_softmax_in_fp32", "fp32_residual_connection")),
    ("multi_latent_attention", "multi_latent_attention"),
    ("num_moe_experts", "num_experts"),
    *((name, name) for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq")),
    *((name, name) for name in ("moe_router_topk", "moe_router_score_function", "moe_router_enable_expert_bias")),
    *((name, name) for name in ("moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_router_dtype")),
    *((name, name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_topk_scaling_factor")),
    *((name, name) for name in ("moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk")),
    *((name, name) for name in ("moe_shared_expert_gate", "moe_input_jitter_eps", "moe_expert_capacity_factor")),
    *((name, name) for name in ("moe_pad_expert_input_to_capacity", "moe_token_drop_policy")),
    ("layernorm_epsilon", "norm_epsilon"),
    ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
)
IN_OPTIMIZER = (
    *((name, name) for name in ("optimizer", "lr", "min_lr", "weight_decay", "clip_grad")),
    *((name, name) for name in ("adam_beta1", "adam_beta2", "adam_eps", "use_distributed_optimizer")),
)
# What the state of Megatron's scheduler leaves out.
IN_SCHEDULER = (
    ("init_lr", "lr_warmup_init"),
    ("wsd_decay_steps", "lr_wsd_decay_iters"),
    ("lr_wsd_decay_style", "lr_wsd_decay_style"),
)
IN_MODEL = (
    ("vocab_size", "padded_vocab_size"),
    ("max_sequence_length", "max_position_embeddings"),
    ("position_embedding_type", "position_embedding_type"),
    ("rotary_percent", "rotary_percent"),
    ("rotary_base", "rotary_base"),
)
IN_LAYOUT = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("cp", "context_parallel_size"),
    ("ep", "expert_model_parallel_size"),
    ("expert_tp", "expert_tensor_parallel_size"),
    ("dp", "data_parallel_size"),
    ("world_size", "world_size"),
)
IN_JOB = (("global_batch", "global_batch_size"), ("micro_batch", "micro_batch_size"), ("seed", "seed"))
# (gated, function) of each activation that Megatron's arguments can name, and the argument.
ACTIVATIONS = (
    (True, torch.nn.functional.silu, "swiglu"),
    (False, squared_relu, "squared_relu"),
    (True, quick_gelu, "quick_geglu"),
)


def megatron_arguments(job: TrainingJob, state: TrainState, world: MegatronWorld) -> dict[str, Any]:
    """Equal on all ranks. What cannot be found out (of a model that is no GPTModel) is left out."""
    config, model = state.config, unwrapped(state.model)
    found = _named(config, IN_CONFIG) | _named(optimizer_chain(state.optimizer).config, IN_OPTIMIZER)
    found |= _named(state.scheduler, IN_SCHEDULER) | _named(model, IN_MODEL) | _activation(config)
    found |= _named(world.layout, IN_LAYOUT) | _named(job, IN_JOB)
    found["group_query_attention"] = found.get("num_query_groups") != found.get("num_attention_heads")
    found |= _named(job, (("seq_length", "seq_length"),)) or _named(model, (("max_sequence_length", "seq_length"),))
    if (tied := getattr(model, "share_embeddings_and_output_weights", None)) is not None:
        found["untie_embeddings_and_output_weights"] = not tied
    return found


def _named(source: Any, names: Iterable[tuple[str, str]]) -> dict[str, Any]:
    pairs = ((theirs, getattr(source, ours, None)) for ours, theirs in names)
    return {name: value for name, value in pairs if isinstance(value, bool | int | float | str | list)}


def _activation(config: Any) -> dict[str, Any]:
    """`activation` is empty if Megatron's arguments say it: by one of these, or by none for GELU without a gate."""
    gated, function = bool(getattr(config, "gated_linear_unit", False)), getattr(config, "activation_func", None)
    flags: dict[str, Any] = {name: (gated, function) == (gate, each) for gate, each, name in ACTIVATIONS}
    if any(flags.values()) or (not gated and function is torch.nn.functional.gelu):
        return {**flags, "activation": ""}
    return {**flags, "activation": f"{getattr(function, '__name__', 'none')} with{'' if gated else 'out'} a gate"}
