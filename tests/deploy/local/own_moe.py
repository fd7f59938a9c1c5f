"""A user's job with experts: another dispatcher, own samples, another activation. Nothing of it is ours."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from liver_core.training.megatron_job import MegatronJob, config_for, finish_build

SEQUENCE, VOCABULARY = 32, 128


class OwnMoe(MegatronJob):
    """Learns to count: sample n is numbers from n on, in steps of one to four."""

    def __init__(self, args: dict[str, Any], *, global_batch: int, micro_batch: int, seed: int) -> None:
        self.args, self.global_batch, self.micro_batch, self.seed = args, global_batch, micro_batch, seed
        self.seq_length = SEQUENCE

    def samples(self, sample_ids: Any) -> torch.Tensor:
        rows = [(number * 7 + torch.arange(SEQUENCE + 1) * (1 + number % 4)) % VOCABULARY for number in sample_ids]
        return torch.stack(rows)

    def build(self, world: Any) -> Any:
        stage = world.coordinates.pp
        config = TransformerConfig(
            **config_for(world, torch.float32),
            num_layers=self.args["num_layers"],
            hidden_size=32,
            num_attention_heads=4,
            ffn_hidden_size=64,
            num_moe_experts=self.args["num_experts"],
            moe_ffn_hidden_size=24,
            moe_router_topk=2,
            moe_token_dispatcher_type="allgather",
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=1e-2,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=1e-3,
            # Megatron-Core 0.16.1 cannot train biases of such experts without EP: it adds them to a view in place.
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=self.args["num_experts"], moe_grouped_gemm=False
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=stage == 0,
            post_process=stage == world.layout.pp - 1,
            position_embedding_type="rope",
            pg_collection=world.collection,
        )
        adam = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=True)
        return finish_build(world, config, model, optimizer=adam)

    def forward(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
        return model(tokens, positions, self.causal_mask(), labels=labels)

    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.float().mean()

    def initial_parameter(self, spec: Any, generator: torch.Generator) -> torch.Tensor:
        if len(spec.shape) == 1:
            return torch.zeros(spec.shape) if spec.name.endswith("bias") else torch.ones(spec.shape)
        return torch.randn(spec.shape, generator=generator) * 0.05
