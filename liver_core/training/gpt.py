"""The reference job: a Megatron-Core GPT on a Megatron indexed dataset. The demo and the tests run it.

It is what a user would write: it passes everything that Megatron needs, and reads nothing from the global
parallel_state. Its layers are dense, or have experts behind a router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from pydantic import BaseModel, ConfigDict, Field, model_validator

from liver_core.layout import ParallelLayout, ParameterSpec
from liver_core.layout.fit import check_experts
from liver_core.training.corpus import SampleReader
from liver_core.training.job import TrainState
from liver_core.training.megatron_job import MegatronJob, config_for, finish_build, keep_fp32
from liver_core.worlds.megatron import MegatronWorld


class GptArguments(BaseModel):
    """The `args` of a job file whose entrypoint is GptJob."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: int = Field(12, ge=1, le=1024)
    hidden_size: int = Field(128, ge=8)
    ffn_hidden_size: int | None = Field(None, ge=8, description="without it, four times hidden_size as in Megatron")
    num_attention_heads: int = Field(4, ge=1)
    num_query_groups: int | None = Field(None, ge=1)
    seq_length: int = Field(128, ge=8)
    padded_vocab_size: int = Field(
        264, ge=1, description="fixed for the job's life; a multiple of every TP size it may use"
    )
    share_embeddings_and_output_weights: bool = Field(False, description="tied embeddings; with PP1 only")
    precision: str = Field("fp32", pattern="^(fp32|bf16)$")
    num_experts: int | None = Field(None, ge=1, le=1024, description="of each layer with experts; a multiple of EP")
    moe_layer_freq: int | list[Literal[0, 1]] = Field(
        1, description="every how many layers one has experts, or of each layer whether it has"
    )
    moe_ffn_hidden_size: int | None = Field(None, ge=8, description="of an expert; without it, ffn_hidden_size")
    moe_router_topk: int = Field(2, ge=1)
    moe_shared_expert_intermediate_size: int | None = Field(
        None, ge=8, description="of the experts that all tokens go through; without it there are none"
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = Field(
        False, description="balance experts by a bias that each step changes; needs the score function sigmoid"
    )
    moe_router_bias_update_rate: float = Field(1e-3, ge=0)
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    moe_aux_loss_coeff: float = Field(0.0, ge=0)
    moe_z_loss_coeff: float | None = Field(None, ge=0)
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    norms_in_fp32: bool = Field(False, description="with bf16: weights of norms are fp32 all the same")
    lr: float = Field(1e-3, gt=0)
    min_lr: float = Field(1e-4, ge=0)
    warmup_steps: int = Field(10, ge=0)
    decay_steps: int = Field(10_000, ge=1)
    weight_decay: float = Field(0.01, ge=0)
    override_opt_param_scheduler: bool = Field(
        False, description="these rates and lengths count, not those of the checkpoint that a job starts from"
    )
    clip_grad: float = Field(1.0, ge=0)
    adam_eps: float = Field(1e-8, gt=0)
    init_std: float = Field(0.02, gt=0)
    grad_reduce_in_fp32: bool = Field(True, description="without it gradients have the dtype of their weights")
    overlap_grad_reduce: bool = Field(False, description="reduce each gradient bucket during the backward pass")
    overlap_param_gather: bool = Field(False, description="gather the weights of each bucket during the forward pass")
    ddp_bucket_size: int | None = Field(
        None, ge=1, description="elements at which a gradient bucket is full; without it, Megatron's default"
    )
    data_prefix: str = Field(description="path of the indexed dataset without .bin and .idx")

    @model_validator(mode="after")
    def _overlaps_agree(self) -> GptArguments:
        for name, given in (
            ("overlap_param_gather", self.overlap_param_gather),
            ("ddp_bucket_size", self.ddp_bucket_size is not None),
        ):
            if given and not self.overlap_grad_reduce:
                raise ValueError(f"{name}: needs overlap_grad_reduce; without it there is one bucket")
        return self

    @model_validator(mode="after")
    def _dtypes_agree(self) -> GptArguments:
        if self.norms_in_fp32 and self.precision != "bf16":
            raise ValueError(f"norms_in_fp32: needs precision bf16, is {self.precision}")
        return self

    @model_validator(mode="after")
    def _experts_agree(self) -> GptArguments:
        if self.num_experts is None:
            named = sorted(name for name in self.model_fields_set if name.startswith("moe_"))
            if named:
                raise ValueError(f"{named[0]}: needs num_experts")
            return self
        if self.moe_router_topk > self.num_experts:
            raise ValueError(f"moe_router_topk: {self.moe_router_topk} is more than num_experts {self.num_experts}")
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            raise ValueError("moe_router_enable_expert_bias: needs moe_router_score_function sigmoid")
        if self.moe_aux_loss_coeff and self.moe_router_load_balancing_type == "none":
            raise ValueError("moe_aux_loss_coeff: needs a moe_router_load_balancing_type other than none")
        if isinstance(self.moe_layer_freq, list) and len(self.moe_layer_freq) != self.num_layers:
            raise ValueError(
                f"moe_layer_freq: must say of each of the {self.num_layers} layers whether it has experts, "
                f"says it of {len(self.moe_layer_freq)}"
            )
        if isinstance(self.moe_layer_freq, int) and self.moe_layer_freq < 1:
            raise ValueError(f"moe_layer_freq: must be at least 1, is {self.moe_layer_freq}")
        if self.norms_in_fp32:
            raise ValueError("norms_in_fp32: does not go with num_experts")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> GptArguments:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        return self

    @property
    def moe_ffn(self) -> int:
        """The inner size of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size or 4 * self.hidden_size


class GptJob(MegatronJob):
    """See GptArguments. `global_batch` and `micro_batch` in samples."""

    def __init__(self, args: dict[str, Any], *, global_batch: int, micro_batch: int, seed: int) -> None:
        self.args = GptArguments(**args)
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.seq_length = self.args.seq_length
        self._reader: SampleReader | None = None

    def check_layout(self, layout: ParallelLayout) -> None:
        args, heads = self.args, self.args.num_attention_heads
        groups = args.num_query_groups or heads
        per_round = self.micro_batch * layout.dp
        divisible = (
            ("num_layers", args.num_layers, "PP", layout.pp),
            ("num_attention_heads", heads, "TP", layout.tp),
            ("num_query_groups", groups, "TP", layout.tp),
            ("ffn_hidden_size", args.ffn_hidden_size or 4 * args.hidden_size, "TP", layout.tp),
            ("padded_vocab_size", args.padded_vocab_size, "TP", layout.tp),
            ("global_batch", self.global_batch, "micro_batch x DP", per_round),
        )
        if args.num_experts is not None:
            divisible += (
                ("moe_ffn_hidden_size", args.moe_ffn, "ETP", layout.expert_tp),
                ("moe_shared_expert_intermediate_size", args.moe_shared_expert_intermediate_size or 0, "TP", layout.tp),
                ("seq_length", args.seq_length, "TP", layout.tp),
            )
        for name, value, axis, size in divisible:
            if value % size:
                raise ValueError(f"{name}: {value} is not a multiple of {axis} {size} (layout {layout})")
        check_experts(layout, args.num_experts or 0)
        if self.args.share_embeddings_and_output_weights and layout.pp > 1:
            raise ValueError(f"share_embeddings_and_output_weights: tied embeddings run with PP1 only, not in {layout}")
        if layout.cp != 1 or layout.vpp != 1:
            raise ValueError(f"layout: {layout} uses CP or VPP, which the reference job does not support yet")

    def build(self, world: MegatronWorld) -> TrainState:
        self.check_layout(world.layout)
        config = self._transformer_config(world)
        stage, stages = world.coordinates.pp, world.layout.pp
        model = GPTModel(
            config=config,
            transformer_layer_spec=self._layer_spec(config, stage),
            vocab_size=self.args.padded_vocab_size,
            max_sequence_length=self.args.seq_length,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            share_embeddings_and_output_weights=self.args.share_embeddings_and_output_weights,
            position_embedding_type="rope",
            pg_collection=world.collection,
        )
        if self.args.norms_in_fp32:
            _keep_norms_in_fp32(model)
        state = finish_build(world, config, model, ddp=self._ddp_config(), optimizer=self._optimizer_config())
        state.scheduler = self._scheduler(state.optimizer)
        return state

    def initial_parameter(self, spec: ParameterSpec, generator: torch.Generator) -> torch.Tensor:
        if spec.name.endswith("bias"):
            return torch.zeros(spec.shape)
        if len(spec.shape) == 1:
            return torch.ones(spec.shape)
        scaled = spec.name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        std = self.args.init_std / (2 * self.args.num_layers) ** 0.5 if scaled else self.args.init_std
        return torch.randn(spec.shape, generator=generator) * std

    def warm_up(self) -> None:
        """Open the dataset."""
        self._samples_reader()

    def samples(self, sample_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        return self._samples_reader().batch(sample_ids)

    def forward(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["tokens"], batch["position_ids"], self.causal_mask(), labels=batch["labels"])

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean over the micro-batch's tokens."""
        mask = batch["loss_mask"].view(-1).float()
        return (output.float().view(-1) * mask).sum() / mask.sum()

    def _samples_reader(self) -> SampleReader:
        if self._reader is None:
            self._reader = SampleReader(self.args.data_prefix, seq_length=self.args.seq_length, seed=self.seed)
        return self._reader

    def _transformer_config(self, world: MegatronWorld) -> TransformerConfig:
        args = self.args
        return TransformerConfig(
            **config_for(world, torch.bfloat16 if args.precision == "bf16" else torch.float32),
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **self._moe_config(world.layout),
        )

    def _moe_config(self, layout: ParallelLayout) -> dict[str, Any]:
        """What Megatron wants to hear of experts."""
        args = self.args
        if args.num_experts is None:
            return {}
        same = ("moe_router_topk", "moe_router_score_function", "moe_router_enable_expert_bias", "moe_layer_freq")
        same += ("moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
        same += ("moe_z_loss_coeff", "moe_token_dispatcher_type", "moe_shared_expert_intermediate_size")
        return {
            **{name: getattr(args, name) for name in same},
            "num_moe_experts": args.num_experts,
            "moe_ffn_hidden_size": args.moe_ffn,
            "moe_router_dtype": "fp32",
            # Megatron wants it of a token's only expert: after a softmax over one the router would learn nothing.
            "moe_router_pre_softmax": args.moe_router_topk == 1 and args.moe_router_score_function == "softmax",
            # Megatron trains experts with tensor parallelism only where sequences are cut over its ranks.
            "sequence_parallel": layout.tp > 1,
        }

    def _layer_spec(self, config: TransformerConfig, stage: int) -> Any:
        args = self.args
        if args.num_experts is None:
            return get_gpt_layer_local_spec(normalization="RMSNorm")
        spec: Any = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", pp_rank=stage
        )
        if config.sequence_parallel:
            spec.layer_norm = _SequenceParallelNorm
            for layer in spec.layer_specs:
                layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _SequenceParallelNorm
        return spec

    def _ddp_config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.args.grad_reduce_in_fp32,
            use_distributed_optimizer=True,
            overlap_grad_reduce=self.args.overlap_grad_reduce,
            overlap_param_gather=self.args.overlap_param_gather,
            bucket_size=self.args.ddp_bucket_size,
        )

    def _optimizer_config(self) -> OptimizerConfig:
        args = self.args
        return OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            bf16=args.precision == "bf16",
            params_dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32,
            use_distributed_optimizer=True,
        )

    def _scheduler(self, optimizer: Any) -> OptimizerParamScheduler:
        args = self.args
        return OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=args.lr,
            min_lr=args.min_lr,
            lr_warmup_steps=args.warmup_steps,
            lr_decay_steps=max(args.decay_steps, args.warmup_steps + 1),
            lr_decay_style="cosine",
            start_wd=args.weight_decay,
            end_wd=args.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=args.override_opt_param_scheduler,
        )


class _SequenceParallelNorm(torch.nn.RMSNorm):
    """Megatron's stand-in for torch's norm refuses sequence parallelism. A norm looks at each token alone, so that it
    is right if gradients are summed over TP, which its weight asks for."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]


def _keep_norms_in_fp32(model: torch.nn.Module) -> None:
    """What goes through a norm is fp32 there, and has its own dtype before and after."""
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            for parameter in module.parameters():
                keep_fp32(parameter)
            module.register_forward_pre_hook(lambda _, given: tuple(each.float() for each in given))
            module.register_forward_hook(lambda _, given, made: made.bfloat16())
