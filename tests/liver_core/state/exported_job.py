"""The job that an exported checkpoint describes: model, optimizer and batch are built from its arguments alone.

Which argument is which setting of Megatron-Core is as in megatron/training (arguments.py, training.py) and
gpt_builders.py of Megatron-LM core_v0.16.1. Samples and loss are the reference job's.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from liver_core.training.gpt import GptJob
from liver_core.training.job import TrainState
from liver_core.training.megatron_job import config_for, finish_build
from liver_core.worlds.megatron import MegatronWorld

SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "rotary_interleaved", "add_bias_linear", "add_qkv_bias", "attention_dropout", "hidden_dropout",
)  # fmt: skip
OPTIMIZER = (
    "optimizer", "lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps",
    "use_distributed_optimizer",
)  # fmt: skip


class ExportedJob(GptJob):
    """`exported`: the arguments in the folder. `data_prefix`: the text, which a checkpoint does not know."""

    def __init__(self, exported: Namespace, data_prefix: str) -> None:
        batch = {"global_batch": exported.global_batch_size, "micro_batch": exported.micro_batch_size}
        super().__init__({"data_prefix": data_prefix, "seq_length": exported.seq_length}, **batch, seed=exported.seed)
        self.exported = exported

    def build(self, world: MegatronWorld) -> TrainState:
        told = self.exported
        assert told.swiglu and told.position_embedding_type == "rope" and not told.bf16
        config = TransformerConfig(
            **config_for(world),
            **_chosen(told, SHAPE),
            layernorm_epsilon=told.norm_epsilon,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
        )
        stage = world.coordinates.pp
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization=told.normalization),
            vocab_size=told.padded_vocab_size,
            max_sequence_length=told.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == world.layout.pp - 1,
            share_embeddings_and_output_weights=not told.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_percent=told.rotary_percent,
            rotary_base=told.rotary_base,
            pg_collection=world.collection,
        )
        state = finish_build(world, config, model, optimizer=OptimizerConfig(**_chosen(told, OPTIMIZER)))
        # As with --use-checkpoint-opt-param-scheduler: what is given here is overwritten by the checkpoint's.
        state.scheduler = OptimizerParamScheduler(
            state.optimizer, init_lr=told.lr_warmup_init, max_lr=told.lr, min_lr=told.min_lr, lr_warmup_steps=0,
            lr_decay_steps=800, lr_decay_style="linear", start_wd=told.weight_decay, end_wd=told.weight_decay,
            wd_incr_steps=800, wd_incr_style="constant", use_checkpoint_opt_param_scheduler=True,
        )  # fmt: skip
        return state


def _chosen(told: Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(told, name) for name in names}
