"""The reference GPT under other optimizers: the class inside Megatron's DistributedOptimizer is exchanged.

Megatron asserts Adam when its optimizer is made and cares no more afterwards; so does this project, which finds moments
by looking at the optimizer.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from liver_core.state.optimizer_chain import optimizer_chain
from liver_core.streaming.header import HEADER_BYTES
from liver_core.training import gpt
from liver_core.training.gpt import GptJob
from liver_core.training.job import TrainingJob
from liver_core.training.megatron_job import finish_build
from tests.liver_core.streaming.optimizers import FusedAdam, Lion


class SgdJob(GptJob):
    """SGD with momentum: one moment, no count of steps."""

    def build(self, world: Any) -> Any:
        return _exchanged(super().build(world), torch.optim.SGD, {"momentum": 0.9})


class LionJob(GptJob):
    """A class of the user's own, with one moment of another name."""

    def build(self, world: Any) -> Any:
        return _exchanged(super().build(world), Lion, {"betas": (0.9, 0.99)})


class GroupCountJob(GptJob):
    """Counts its steps in the parameter groups, as the fused Adam of Transformer Engine does; decay as in Adam."""

    def build(self, world: Any) -> Any:
        state = _exchanged(super().build(world), FusedAdam, {"betas": (0.9, 0.999)})
        inner: Any
        for inner in optimizer_chain(state.optimizer).inner:
            inner.adam_w_mode = 0
        return state


class FusedJob(GptJob):
    """AdamW in its fused CPU implementation, whose steps on parts of a tensor are not the step on the whole one."""

    def build(self, world: Any) -> Any:
        settings = {"betas": (0.9, 0.999), "eps": 1e-8, "fused": True}
        return _exchanged(super().build(world), torch.optim.AdamW, settings)


class WordyJob(GptJob):
    """Its parameter groups have so much to say that a step does not fit into the header of a slot; one group does."""

    remark = HEADER_BYTES * 2 // 3

    def build(self, world: Any) -> Any:
        state = super().build(world)
        for group in optimizer_chain(state.optimizer).groups:
            group["remark"] = "x" * self.remark
        return state


class VeryWordyJob(WordyJob):
    """Not even one group fits."""

    remark = HEADER_BYTES


def _exchanged(state: Any, kind: Any, settings: dict[str, Any]) -> Any:
    """The inner optimizer becomes one of class `kind` over the same tensors; groups keep rates and Megatron's keys."""
    for distributed in optimizer_chain(state.optimizer).parts:
        before = distributed.optimizer
        made = kind([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, **settings)
        defaults = {key: value for key, value in made.param_groups[0].items() if key != "params"}
        # Set, not added: Megatron's fp32 shards are views, which add_param_group refuses.
        made.param_groups = [
            defaults | {key: value for key, value in group.items() if key not in before.defaults or key in _RATES}
            for group in before.param_groups
        ]
        distributed.optimizer = made
    return state


_RATES = ("params", "lr", "weight_decay")


class TwoOptimizersJob(GptJob):
    """With data parallelism alone its norms have an optimizer of their own, as experts have where they are cut."""

    def build(self, world: Any) -> Any:
        if world.layout.tp * world.layout.pp > 1:
            return super().build(world)

        def finish(world: Any, config: Any, model: Any, **settings: Any) -> Any:
            for name, parameter in model.named_parameters():
                parameter.allreduce = "norm" not in name  # What Megatron knows parameters of experts by.
            return finish_build(world, config, model, **settings)

        with mock.patch.object(gpt, "finish_build", finish):
            state = super().build(world)
        assert len(optimizer_chain(state.optimizer).parts) == 2
        return state


class DropoutJob(GptJob):
    """Draws random numbers in every forward pass: a step that is done again must draw the same ones."""

    def build(self, world: Any) -> Any:
        state = super().build(world)
        for module in state.model.modules():
            if isinstance(getattr(module, "hidden_dropout", None), float):
                module.hidden_dropout = 0.2
        return state


class WholeStepsJob(GptJob):
    """Has no parts."""

    step_in_parts = TrainingJob.step_in_parts
