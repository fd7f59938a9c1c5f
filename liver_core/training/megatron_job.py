"""The half of a Megatron job that is the same for all: model, optimizer and step on the explicit groups of a world.

A job derives from `MegatronJob`, says what a step computes (`samples`, `forward`, `loss`), and in its `build` makes a
config with `config_for` and a state with `finish_build`. Nothing here reads Megatron's global parallel_state. One of
the few places that import Megatron-Core.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer import TransformerConfig

from liver_core.device.rank_device import on_device, own_device
from liver_core.training.job import MicroBatch, StepResult, TrainingJob, TrainState
from liver_core.training.unsupported_settings import refusals
from liver_core.worlds.megatron import MegatronWorld, mark_tensor_parallel

_log = logging.getLogger(__name__)
_KEEPS_FP32 = "keeps_fp32"
_LossAs = Callable[[torch.Tensor], tuple[Any, ...]]


def config_for(world: MegatronWorld, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What the TransformerConfig of a model in `world` must say, besides its shape: `TransformerConfig(**config_for(
    world), num_layers=...)`. `dtype`: of the parameters, float32 or bfloat16."""
    layout, bf16 = world.layout, dtype == torch.bfloat16
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": bf16,
        # Parameters are filled from global coordinates, a checkpoint or the previous world: drawing them here
        # would move the training world's random state.
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # One message at a time: of two batched ones between the same two stages Megatron 0.16.1 can take the wrong one.
        "batch_p2p_comm": False,
        "batch_p2p_sync": False,
    }


def finish_build(
    world: MegatronWorld,
    config: TransformerConfig,
    model: torch.nn.Module,
    *,
    optimizer: OptimizerConfig,
    ddp: DistributedDataParallelConfig | None = None,
) -> TrainState:
    """Wrap `model` for data parallelism and make its optimizer, on the groups of `world` only. Without a scheduler:
    set `scheduler` of what this returns. With bf16 all parameters become bf16 that are not marked by `keep_fp32`. The
    distributed optimizer is turned on where it is off. Raises ValueError for a setting that a handoff cannot do with.
    """
    if config.perform_initialization:
        raise ValueError(
            "perform_initialization: must be False; drawing weights moves the random streams of the world that "
            "trains, and LiveR fills parameters from initial_parameter. Use TransformerConfig(**config_for(world), ...)"
        )
    ddp = ddp or DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    # Megatron itself may fail over some of them, with a word about something else.
    for name, why in refusals(optimizer, ddp, config).items():
        raise ValueError(f"{name}: {why}")
    if not (optimizer.use_distributed_optimizer and ddp.use_distributed_optimizer):
        _log.warning("use_distributed_optimizer: set to True; steps are the same, and its shards are what LiveR moves")
        optimizer.use_distributed_optimizer = ddp.use_distributed_optimizer = True
    mark_tensor_parallel(model)
    # Megatron makes its own layers where it trains, but torch's, such as norms, on the host.
    model = model.to(own_device())
    if config.bf16:
        model = model.bfloat16()
        for parameter in model.parameters():
            if getattr(parameter, _KEEPS_FP32, False):
                parameter.data = parameter.data.float()
    wrapped = DistributedDataParallel(config, ddp, model, pg_collection=world.collection)
    if ddp.overlap_grad_reduce:
        # Gradients are reduced in the last micro-batch's backward pass, not in those that accumulate.
        config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = functools.partial(finalize_model_grads, pg_collection=world.collection)
    made = get_megatron_optimizer(optimizer, [wrapped], use_gloo_process_groups=False, pg_collection=world.collection)
    return TrainState(wrapped, made, None, config)


def keep_fp32(parameter: torch.nn.Parameter) -> None:
    """Before `finish_build`: this parameter stays fp32 in a bf16 model. Its module must take and give what its
    neighbours compute with."""
    setattr(parameter, _KEEPS_FP32, True)


def _divided(loss: torch.Tensor) -> tuple[Any, ...]:
    """The schedule divides it by its micro-batches, in place: hence the copy."""
    return loss, {"loss": loss.detach().clone()}


def _undivided(loss: torch.Tensor) -> tuple[Any, ...]:
    """For a part of a step. The tokens are what Megatron wants to hear where it does not divide; nobody uses them."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {"loss": loss.detach().clone()}


class MegatronJob(TrainingJob):
    """One step is: for each micro-batch `loss(forward(model, samples(ids)))`, backward, gradients reduced."""

    seq_length: int

    @abstractmethod
    def samples(self, sample_ids: Sequence[int]) -> Any:
        """The batch of these samples, the same whenever it is asked for: tensors, and lists, tuples and mappings of
        them. `forward` and `loss` get it on the rank's device."""

    @abstractmethod
    def forward(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """What this stage's model makes of a batch: on the last stage what `loss` takes."""

    @abstractmethod
    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """The mean loss of one micro-batch, a scalar; asked on the last stage only."""

    def causal_mask(self) -> torch.Tensor | None:
        """bool [1, 1, sequence, sequence], True is masked. Megatron would make its own on the GPU only."""
        return None if torch.cuda.is_available() else _causal_mask(self.seq_length)

    def step(self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch]) -> StepResult:
        _zero_gradients(state)
        return self._result(world, batches, self._pass(state, world, batches))

    def step_in_parts(
        self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch], every: int
    ) -> Generator[None, None, StepResult]:
        _zero_gradients(state)
        losses: list[Any] = []
        for start in range(0, len(batches), every):
            last = start + every >= len(batches)
            with _part_of_step(state, step_of=len(batches), last=last):
                losses += self._pass(state, world, batches[start : start + every], loss_as=_undivided)
            if not last:
                yield
        return self._result(world, batches, losses)

    def _pass(
        self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch], *, loss_as: _LossAs = _divided
    ) -> list[Any]:
        """Forward and backward; returns the loss of each micro-batch, on the last stage only. `loss_as`: how a loss is
        given to the schedule. Raises ValueError where Megatron would not average what `loss` returns."""
        if state.config.calculate_per_token_loss:
            raise ValueError(
                "calculate_per_token_loss: must be False; loss() returns a mean, and with this setting Megatron adds "
                "gradients up over DP, so that each layout would train with others"
            )
        return _schedule(world, state)(
            forward_step_func=functools.partial(self._forward_step, loss_as=loss_as),
            data_iterator=(on_device(self.samples(batch.sample_ids)) for batch in batches),
            model=[state.model],
            num_microbatches=len(batches),
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch,
            decoder_seq_length=self.seq_length,
            forward_only=False,
            pg_collection=world.collection,
        )

    def _forward_step(self, samples: Iterator[Any], model: torch.nn.Module, loss_as: _LossAs):
        batch = next(samples)
        return self.forward(model, batch), lambda output: loss_as(self.loss(output, batch))

    def _result(self, world: MegatronWorld, batches: Sequence[MicroBatch], losses: list[Any]) -> StepResult:
        here = world.coordinates
        first_of_replica = here.tp == 0 and here.pp == 0 and here.cp == 0
        samples = sum(len(batch.sample_ids) for batch in batches)
        tokens = samples * self.seq_length if first_of_replica else 0
        counted = losses if here.tp == 0 else []
        if not counted:
            return StepResult(0.0, 0, tokens)
        # Added one after the other in float64, as the host would.
        sums = torch.stack([loss["loss"] for loss in counted]).double().cumsum(0)
        return StepResult(sums.narrow(0, -1, 1), len(counted), tokens)


def _schedule(world: MegatronWorld, state: TrainState):
    if world.layout.pp == 1:
        return forward_backward_no_pipelining
    # One made by Megatron itself would take the group from parallel_state.
    communicator = state.extra.setdefault("p2p", P2PCommunicator(world.collection.pp, state.config))
    return functools.partial(forward_backward_pipelining_without_interleaving, p2p_communicator=communicator)


@functools.cache
def _causal_mask(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool, device="cpu").triu(1)[None, None]


def _zero_gradients(state: TrainState) -> None:
    state.model.zero_grad_buffer()
    state.optimizer.zero_grad()


@contextlib.contextmanager
def _part_of_step(state: TrainState, *, step_of: int, last: bool) -> Iterator[None]:
    """Have Megatron's schedule do a part of a step of `step_of` micro-batches; only the last part reduces gradients.

    The schedule would divide by its own number of micro-batches. `grad_scale_func` divides instead: Megatron applies it
    to the loss and to the scale of auxiliary losses. The schedule alone sees this: modules keep the config they have.
    """
    model, config = state.model, state.model.config
    part, given, finalize = copy.copy(config), config.grad_scale_func, config.finalize_model_grads_func
    part.calculate_per_token_loss = True
    part.grad_scale_func = lambda loss: (loss if given is None else given(loss)) / step_of
    if last:
        part.finalize_model_grads_func = lambda models, _tokens, **named: finalize(models, None, **named)
    else:
        part.finalize_model_grads_func = part.no_sync_func = None
    model.config = part
    try:
        with contextlib.nullcontext() if last else model.no_sync():
            yield
    finally:
        model.config = config
