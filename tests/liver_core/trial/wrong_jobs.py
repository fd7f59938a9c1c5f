"""The reference job, each time with one mistake that a person makes when porting a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear

from liver_core.layout import ParallelLayout
from liver_core.training.gpt import GptJob
from liver_core.training.job import TrainingJob, TrainState
from liver_core.worlds.megatron import mark_tensor_parallel


class NotAJob:
    """Right in all but its base."""

    def __init__(self, args: dict[str, Any], *, global_batch: int, micro_batch: int, seed: int) -> None: ...


class Unfinished(TrainingJob):
    """Lacks what a job must have."""

    def build(self, world: Any) -> Any: ...


class OldSignature(GptJob):
    def __init__(self, config: dict[str, Any]) -> None: ...


class BuildRaises(GptJob):
    def build(self, world: Any) -> TrainState:
        raise KeyError("rope_theta")


class BuildReturnsTuple(GptJob):
    def build(self, world: Any) -> Any:
        state = super().build(world)
        return state.model, state.optimizer


class BuildDraws(GptJob):
    def build(self, world: Any) -> TrainState:
        torch.rand(3)
        return super().build(world)


class BuildComputes(GptJob):
    """Looks at parameters, which a next world has not got yet."""

    def build(self, world: Any) -> TrainState:
        state = super().build(world)
        torch.cat([parameter.reshape(-1) for parameter in state.model.parameters()])
        return state


class AsksGlobals(GptJob):
    def build(self, world: Any) -> TrainState:
        parallel_state.get_tensor_model_parallel_rank()
        return super().build(world)


class Unmarked(GptJob):
    """Built by hand, without mark_tensor_parallel or with it too late."""

    late = False

    def build(self, world: Any) -> TrainState:
        right = super().build(world)
        model = right.model.module
        for part in model.modules():
            if isinstance(part, ColumnParallelLinear):
                delattr(part.weight, "tensor_model_parallel")
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(right.config, ddp, model, pg_collection=world.collection)
        optimizer = get_megatron_optimizer(
            self._optimizer_config(), [wrapped], use_gloo_process_groups=False, pg_collection=world.collection
        )
        if self.late:
            mark_tensor_parallel(model)
        return TrainState(wrapped, optimizer, None, right.config)


class MarkedLate(Unmarked):
    late = True


class LossIsNan(GptJob):
    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(output, batch) * float("nan")


class NanLater(GptJob):
    """From the third step on."""

    def step(self, state: Any, world: Any, batches: Sequence[Any]) -> Any:
        self.past = batches[0].sample_ids[0] >= 2 * self.global_batch
        return super().step(state, world, batches)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(output, batch) * (float("nan") if self.past else 1.0)


class DataGoesOn(GptJob):
    """Takes the next samples, whichever are asked for."""

    asked = 0

    def samples(self, sample_ids: Sequence[int]) -> Any:
        self.asked += len(sample_ids)
        return super().samples(range(self.asked, self.asked + len(sample_ids)))


class StepsItself(GptJob):
    def step(self, state: Any, world: Any, batches: Sequence[Any]) -> Any:
        result = super().step(state, world, batches)
        state.optimizer.step()
        return result


class KeepsGradients(GptJob):
    """Forgets to zero them."""

    def step(self, state: Any, world: Any, batches: Sequence[Any]) -> Any:
        return self._result(world, batches, self._pass(state, world, batches))


class ReturnsLoss(GptJob):
    def step(self, state: Any, world: Any, batches: Sequence[Any]) -> Any:
        return float(super().step(state, world, batches).loss_sum)


class ForgetfulSchedule(GptJob):
    """Its schedule begins anew whenever it is loaded."""

    def build(self, world: Any) -> TrainState:
        state = super().build(world)
        state.scheduler = _Forgetful()
        return state


class _Forgetful:
    def __init__(self) -> None:
        self.count = 0

    def step(self, increment: int) -> None:
        self.count += increment

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class TensorInSchedule(GptJob):
    def build(self, world: Any) -> TrainState:
        state = super().build(world)
        state.scheduler = _WithTensor()
        return state


class _WithTensor(_Forgetful):
    def state_dict(self) -> Any:
        return {"count": torch.tensor(self.count)}


class HiddenState(GptJob):
    """Training depends on something that no checkpoint holds."""

    done = 0

    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        self.done += 1

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(output, batch) * (1.0 + 0.1 * self.done)


class OneStageOnly(GptJob):
    """Its build asks for something that only a world with stages lacks."""

    def build(self, world: Any) -> TrainState:
        assert world.layout.pp == 1, "vp_stage must be provided"
        return super().build(world)


class PicksLayouts(GptJob):
    def check_layout(self, layout: ParallelLayout) -> None:
        if layout.tp > 1:
            raise ValueError("tp: this kernel is written for TP1")


class DrawsOtherwise(GptJob):
    def initial_parameter(self, spec: Any, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(spec.shape)


class HalfParameters(GptJob):
    def initial_parameter(self, spec: Any, generator: torch.Generator) -> torch.Tensor:
        return super().initial_parameter(spec, generator)[: spec.shape[0] // 2]


class OwnExperts(GptJob):
    """Has experts of which the job file says nothing."""

    def __init__(self, args: dict[str, Any], *, global_batch: int, micro_batch: int, seed: int) -> None:
        args = args | {"num_experts": 2}
        super().__init__(args, global_batch=global_batch, micro_batch=micro_batch, seed=seed)


class NothingBestYet(GptJob):
    """Right: what it has not measured yet is NaN."""

    best = math.nan

    def small_state(self, state: TrainState) -> dict[str, Any]:
        return {"best": self.best, "of": [self.best]}

    def load_small_state(self, state: TrainState, small: Any) -> None:
        self.best = small["best"]


class SlowHook(GptJob):
    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        sum(float(torch.ones(100, 100).sum()) for _ in range(20_000))


class Validates(GptJob):
    def validate(self, step: int, state: Any, world: Any) -> None:
        assert step == 3


class ValidatesWithBackward(GptJob):
    def validate(self, step: int, state: Any, world: Any) -> None:
        state.model.zero_grad_buffer()


class FailsBesideOthers(GptJob):
    def build(self, world: Any) -> TrainState:
        if world.rank == 1:
            raise IndexError("no such shard")
        return super().build(world)


class Diverges(GptJob):
    """Its loss depends on the layout."""

    def build(self, world: Any) -> TrainState:
        self.tp = world.layout.tp
        return super().build(world)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(output, batch) / self.tp
