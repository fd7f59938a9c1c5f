"""Optimizers to replay, and a torch-only clip: the same operations as Megatron's without its CUDA type check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from liver_core.state.step_counts import counts_of, form_of
from liver_core.streaming.header import StepHeader
from liver_core.streaming.window_step import StepRule


class Lion(torch.optim.Optimizer):
    """One moment, no step count (Chen et al., "Symbolic discovery of optimization algorithms", 2023)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["ema"] = torch.zeros_like(parameter)
                direction = state["ema"].mul(first).add(parameter.grad, alpha=1 - first).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["ema"].mul_(second).add_(parameter.grad, alpha=1 - second)


class FusedAdam(torch.optim.Optimizer):
    """As Transformer Engine's and Apex's: steps are counted in the parameter group, which has no count before the first
    step; whether decay is decoupled is a setting of the optimizer itself; parameters lie on the device."""

    device_type = "cpu"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = int(adam_w_mode)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            corrections = [1 - beta ** group["step"] for beta in group["betas"]]
            for parameter in group["params"]:
                if parameter.device.type != self.device_type:
                    raise RuntimeError("FusedAdam is for parameters on the device only")
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                if not self.adam_w_mode:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                divisor = (state["exp_avg_sq"] / corrections[1]).sqrt_().add_(group["eps"])
                if self.adam_w_mode:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / corrections[0])


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], tuple[str, ...]]] = {
    "adamw for-loop": (torch.optim.AdamW, {"foreach": False}, ("exp_avg", "exp_avg_sq")),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}, ("exp_avg", "exp_avg_sq")),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}, ("exp_avg", "exp_avg_sq")),
    "adam amsgrad": (torch.optim.Adam, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "sgd": (torch.optim.SGD, {}, ()),
    "sgd momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}, ("momentum_buffer",)),
    "fused adam": (FusedAdam, {"weight_decay": 0.1}, ("exp_avg", "exp_avg_sq")),
    "fused adam, decay in the gradient": (
        FusedAdam,
        {"weight_decay": 0.1, "adam_w_mode": False},
        ("exp_avg", "exp_avg_sq"),
    ),
    "lion": (Lion, {"weight_decay": 0.1}, ("ema",)),
}

KEYS = ("decayed", "not decayed")
CLIP = 1.0


def clip(parameters: list[torch.nn.Parameter], limit: float, norm: float) -> None:
    """`clip_grad_by_total_norm_fp32` with `local_multi_tensor_scale` of megatron-core 0.16.1."""
    coefficient = limit / (norm + 1.0e-6)
    if coefficient < 1.0:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad * coefficient)


def rule(name: str) -> StepRule:
    """Two groups of one class: with and without decay."""
    kind, settings, moments = OPTIMIZERS[name]
    make: Any = kind
    made = [make([torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **settings, **more}) for more in ({}, NO_DECAY)]
    groups = tuple({k: v for k, v in each.param_groups[0].items() if k != "params"} for each in made)
    form = form_of(made[0])
    return StepRule(kind, groups, KEYS, moments, clip, counted=form.counted, attributes=form.attributes)


NO_DECAY = {"weight_decay": 0.0}


class Whole:
    """A source: whole parameters over flat regions, stepped as the job does; moments are made by the first step."""

    def __init__(self, name: str, master: torch.Tensor, sizes: list[int]) -> None:
        self.rule = rule(name)
        self.regions = {kind: torch.zeros_like(master) for kind in ("master", "grad", *self.rule.moments)}
        self.regions["master"].copy_(master)
        self.parameters: list[torch.nn.Parameter] = []
        self.spans: list[tuple[int, int]] = []
        at = 0
        for size in sizes:
            parameter = torch.nn.Parameter(self.regions["master"][at : at + size])
            parameter.grad = self.regions["grad"][at : at + size]
            self.parameters.append(parameter)
            self.spans.append((at, at + size))
            at += size
        self.optimizer = self.rule.make(
            [
                {**settings, "params": self.parameters[number::2]}
                for number, settings in enumerate(self.rule.groups)
                if self.parameters[number::2]
            ]
        )
        self.group_of = [number % 2 for number in range(len(sizes))]

    def header(self, version: int, norm: float) -> StepHeader:
        """The header of the step to `version`, before it is made; sets the rates of that step."""
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = 0.01 * (number + 1) / version
        groups = tuple(
            {"key": KEYS[number], "lr": group["lr"], "weight_decay": group["weight_decay"]}
            | {"counts": counts_of(group, self.rule.counted)}
            for number, group in enumerate(self.optimizer.param_groups)
        )
        return StepHeader(version, norm, CLIP, groups, self._scalars(), bool(self.optimizer.state), 0.01)

    def step(self, norm: float) -> None:
        """Clip, step, and move moments that were made just now into the regions, as a live world does."""
        clip(self.parameters, CLIP, norm)
        self.optimizer.step()
        for (start, stop), parameter in zip(self.spans, self.parameters, strict=True):
            state = self.optimizer.state.get(parameter, {})
            for kind in self.rule.moments:
                window = self.regions[kind][start:stop]
                if state[kind].data_ptr() != window.data_ptr():
                    window.copy_(state[kind])
                    state[kind] = window

    def _scalars(self) -> dict[str, Any]:
        for state in self.optimizer.state.values():
            return {
                name: float(value) if torch.is_tensor(value) else value
                for name, value in state.items()
                if name not in self.rule.moments
            }
        return {}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
