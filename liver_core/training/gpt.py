"""The reference job: a Megatron-Core GPT on a Megatron indexed dataset. The demo and the tests run it.

It is what a user would write: it passes everything that Megatron needs, and reads nothing from the global
parallel_state. Dense models only: it rejects layouts with experts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer import TransformerConfig
from pydantic import BaseModel, ConfigDict, Field, model_validator

from liver_core.layout import ParallelLayout, ParameterSpec
from liver_core.training.corpus import SampleReader
from liver_core.training.job import MicroBatch, StepResult, TrainingJob, TrainState
from liver_core.worlds.megatron import MegatronWorld, mark_tensor_parallel


class GptArguments(BaseModel):
    """The `args` of a job file whose entrypoint is GptJob."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: int = Field(12, ge=1, le=1024)
    hidden_size: int = Field(128, ge=8)
    ffn_hidden_size: int = Field(384, ge=8)
    num_attention_heads: int = Field(4, ge=1)
    num_query_groups: int | None = Field(None, ge=1)
    seq_length: int = Field(128, ge=8)
    padded_vocab_size: int = Field(
        264, ge=1, description="fixed for the job's life; a multiple of every TP size it may use"
    )
    precision: str = Field("fp32", pattern="^(fp32|bf16)$")
    lr: float = Field(1e-3, gt=0)
    min_lr: float = Field(1e-4, ge=0)
    warmup_steps: int = Field(10, ge=0)
    decay_steps: int = Field(10_000, ge=1)
    weight_decay: float = Field(0.01, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    adam_eps: float = Field(1e-8, gt=0)
    init_std: float = Field(0.02, gt=0)
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
    def _heads_divide(self) -> GptArguments:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        return self


class GptJob(TrainingJob):
    """See GptArguments. `global_batch` and `micro_batch` in samples."""

    def __init__(self, args: dict[str, Any], *, global_batch: int, micro_batch: int, seed: int) -> None:
        self.args = GptArguments(**args)
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self._reader: SampleReader | None = None

    def check_layout(self, layout: ParallelLayout) -> None:
        args, heads = self.args, self.args.num_attention_heads
        groups = args.num_query_groups or heads
        per_round = self.micro_batch * layout.dp
        divisible = (
            ("num_layers", args.num_layers, "PP", layout.pp),
            ("num_attention_heads", heads, "TP", layout.tp),
            ("num_query_groups", groups, "TP", layout.tp),
            ("ffn_hidden_size", args.ffn_hidden_size, "TP", layout.tp),
            ("padded_vocab_size", args.padded_vocab_size, "TP", layout.tp),
            ("global_batch", self.global_batch, "micro_batch x DP", per_round),
        )
        for name, value, axis, size in divisible:
            if value % size:
                raise ValueError(f"{name}: {value} is not a multiple of {axis} {size} (layout {layout})")
        if layout.cp != 1 or layout.vpp != 1 or layout.ep != 1:
            raise ValueError(f"layout: {layout} uses CP, VPP or EP, which the reference job does not support yet")

    def build(self, world: MegatronWorld) -> TrainState:
        self.check_layout(world.layout)
        config = self._transformer_config(world.layout)
        stage, stages = world.coordinates.pp, world.layout.pp
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=self.args.padded_vocab_size,
            max_sequence_length=self.args.seq_length,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            pg_collection=world.collection,
        )
        mark_tensor_parallel(model)
        if self.args.precision == "bf16":
            model = model.bfloat16()
        ddp = DistributedDataParallel(config, self._ddp_config(), model, pg_collection=world.collection)
        if self.args.overlap_grad_reduce:
            # Reduce gradients in the last micro-batch's backward pass only, not in those that accumulate.
            config.no_sync_func = ddp.no_sync
        config.finalize_model_grads_func = functools.partial(finalize_model_grads, pg_collection=world.collection)
        optimizer = get_megatron_optimizer(
            self._optimizer_config(), [ddp], use_gloo_process_groups=False, pg_collection=world.collection
        )
        return TrainState(ddp, optimizer, self._scheduler(optimizer), config)

    def step(self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch]) -> StepResult:
        _zero_gradients(state)
        losses = self._pass(state, world, batches, self._forward)
        return self._result(world, batches, losses)

    def step_in_parts(
        self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch], every: int
    ) -> Generator[None, None, StepResult]:
        _zero_gradients(state)
        forward, losses = functools.partial(self._forward, step_of=len(batches)), []
        for start in range(0, len(batches), every):
            last = start + every >= len(batches)
            with _part_of_step(state, last=last):
                losses += self._pass(state, world, batches[start : start + every], forward)
            if not last:
                yield
        return self._result(world, batches, losses)

    def _pass(self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch], forward: Any) -> list[Any]:
        """Forward and backward. Returns the loss function's report of each micro-batch, on the last stage only."""
        return self._schedule(world, state)(
            forward_step_func=forward,
            data_iterator=self._samples(batches),
            model=[state.model],
            num_microbatches=len(batches),
            seq_length=self.args.seq_length,
            micro_batch_size=self.micro_batch,
            decoder_seq_length=self.args.seq_length,
            forward_only=False,
            pg_collection=world.collection,
        )

    def _result(self, world: MegatronWorld, batches: Sequence[MicroBatch], losses: list[Any]) -> StepResult:
        here = world.coordinates
        first_of_replica = here.tp == 0 and here.pp == 0 and here.cp == 0
        samples = sum(len(batch.sample_ids) for batch in batches)
        tokens = samples * self.args.seq_length if first_of_replica else 0
        counted = losses if here.tp == 0 else []
        return StepResult(float(sum(loss["loss"].item() for loss in counted)), len(counted), tokens)

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

    def _schedule(self, world: MegatronWorld, state: TrainState):
        if world.layout.pp == 1:
            return forward_backward_no_pipelining
        communicator = state.extra.setdefault("p2p", P2PCommunicator(world.collection.pp, state.config))
        return functools.partial(forward_backward_pipelining_without_interleaving, p2p_communicator=communicator)

    def _samples(self, batches: Sequence[MicroBatch]) -> Iterator[dict[str, torch.Tensor]]:
        reader = self._samples_reader()
        return (reader.batch(batch.sample_ids) for batch in batches)

    def _samples_reader(self) -> SampleReader:
        if self._reader is None:
            self._reader = SampleReader(self.args.data_prefix, seq_length=self.args.seq_length, seed=self.seed)
        return self._reader

    def _forward(self, samples: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module, step_of: int | None = None):
        """`step_of`: micro-batches of the whole step, if the schedule gets only a part of it."""
        batch = next(samples)
        output = model(batch["tokens"], batch["position_ids"], self._causal_mask(), labels=batch["labels"])
        loss = _mean_loss if step_of is None else functools.partial(_share_of_loss, step_of)
        return output, functools.partial(loss, batch["loss_mask"])

    @functools.cached_property
    def _mask(self) -> torch.Tensor:
        length = self.args.seq_length
        return torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

    def _causal_mask(self) -> torch.Tensor | None:
        """bool [1, 1, sequence, sequence], True is masked. Megatron makes a mask of its own only on a GPU."""
        return None if torch.cuda.is_available() else self._mask

    def _transformer_config(self, layout: ParallelLayout) -> TransformerConfig:
        args = self.args
        return TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            pipeline_dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32,
            params_dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32,
            bf16=args.precision == "bf16",
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            # The loop fills parameters from global coordinates, a checkpoint or the previous world. Drawing them here
            # would advance the training world's random state.
            perform_initialization=False,
            use_cpu_initialization=not torch.cuda.is_available(),
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            batch_p2p_sync=False,
            batch_p2p_comm=False,
            deterministic_mode=False,
        )

    def _ddp_config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
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
        )


def _mean_loss(loss_mask: torch.Tensor, output: torch.Tensor):
    """Mean over the micro-batch's tokens. The copy is needed because the schedule divides the loss in place."""
    mask = loss_mask.view(-1).float()
    loss = (output.float().view(-1) * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone()}


def _share_of_loss(step_of: int, loss_mask: torch.Tensor, output: torch.Tensor):
    """As `_mean_loss`, divided by the micro-batches of the whole step as Megatron would divide it.

    Where Megatron does not divide, it expects a token count too. Nothing uses that count.
    """
    loss, reported = _mean_loss(loss_mask, output)
    return loss / step_of, torch.zeros((), dtype=torch.int), reported


def _zero_gradients(state: TrainState) -> None:
    state.model.zero_grad_buffer()
    state.optimizer.zero_grad()


@contextlib.contextmanager
def _part_of_step(state: TrainState, *, last: bool) -> Iterator[None]:
    """Make Megatron's schedule do a part of a step: it divides no loss, and only the last part reduces gradients.

    By default the schedule divides by its own number of micro-batches, and reduces after each call. Once the world is
    built, nothing else in the reference job reads `calculate_per_token_loss`.
    """
    config = state.config
    divides, finalize, no_sync = config.calculate_per_token_loss, config.finalize_model_grads_func, config.no_sync_func
    config.calculate_per_token_loss = True
    if last:
        config.finalize_model_grads_func = lambda models, _tokens, **named: finalize(models, None, **named)
    else:
        config.finalize_model_grads_func = config.no_sync_func = None
    try:
        with contextlib.nullcontext() if last else state.model.no_sync():
            yield
    finally:
        config.calculate_per_token_loss, config.no_sync_func = divides, no_sync
        config.finalize_model_grads_func = finalize
