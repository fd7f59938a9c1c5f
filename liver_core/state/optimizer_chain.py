"""The distributed optimizers of one rank, as one.

Megatron makes one for the dense parameters of a model and another one for its experts, and chains them. A rank's
elements are numbered over the buffers of all of them, in the chain's order. One of the few places that import
Megatron-Core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from liver_core.layout import StateKind
from liver_core.layout.manifest import FLOAT32, GRAD, OF_PARAMETER
from liver_core.memory.memory_placement import MASTER
from liver_core.same_value import same_value
from liver_core.state.step_counts import OptimizerForm, UnsupportedState, form_of, step_and_count


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerChain:
    """`whole`: what `get_megatron_optimizer` returned. `parts`: those of its optimizers that have a buffer on this
    rank, in Megatron's order: on a stage without experts theirs has none. All are of one class and have one config."""

    whole: Any
    parts: tuple[DistributedOptimizer, ...]

    @property
    def config(self) -> Any:
        return self.parts[0].config

    @property
    def ddp_config(self) -> Any:
        return self.parts[0].ddp_config

    @property
    def model(self) -> Any:
        """The DDP chunk that all of them step."""
        return self.parts[0].model_chunks[0]

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Megatron's buffers of parameters and gradients, in the order of the elements."""
        return tuple(buffer for part in self.parts for buffer in part.buffers)

    @property
    def inner(self) -> tuple[torch.optim.Optimizer, ...]:
        """Torch's own, of the rank's shards."""
        return tuple(part.optimizer for part in self.parts)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all."""
        return [group for inner in self.inner for group in inner.param_groups]

    @property
    def form(self) -> OptimizerForm:
        """What a step changes; found once, on the device. A rank may own nothing of a part, which then tells nothing.
        Raises UnsupportedState as `form_of`, where two parts differ, and where this rank owns nothing at all."""
        owned = [each for each in self.inner if any(group["params"] for group in each.param_groups)]
        if not owned:
            raise UnsupportedState("optimizer: this rank owns no element of its stage, which is too small for its DP")
        first, *others = (form_of(each) for each in owned)
        for other in others:
            for name in ("moments", "counted", "attributes"):
                if not same_value(here := getattr(first, name), there := getattr(other, name)):
                    raise UnsupportedState(f"optimizers of dense parameters and experts: {name} {here} and {there}")
        return first

    @property
    def has_stepped(self) -> bool:
        """Whether the moments exist. The first optimizer step creates them."""
        return any(bool(inner.state) for inner in self.inner)

    def number_of(self, part: DistributedOptimizer) -> int:
        """Of a part, in Megatron's chain."""
        return self._chained.index(part)

    @property
    def is_of_several(self) -> bool:
        """Whether Megatron's chain has more than one, some of which may own nothing."""
        return len(self._chained) > 1

    @property
    def _chained(self) -> list[Any]:
        return list(getattr(self.whole, "chained_optimizers", [self.whole]))

    def stats_group(self) -> dist.ProcessGroup:
        """The ranks over which the gradient norm is summed. Raises UnsupportedState where parts have others."""
        found, *others = (part.get_grad_stats_parallel_group() for part in self.parts)
        if any(other != found for other in others):
            raise UnsupportedState("optimizers: dense parameters and experts sum the gradient norm over other ranks")
        return found

    def step(self) -> None:
        """Step with gradients that are prepared and clipped, and gather the parameters as the job's settings say."""
        step_and_count(self.inner, self.whole.step_with_ready_grads, self.form)


def optimizer_chain(optimizer: Any) -> OptimizerChain:
    """The distributed optimizers inside the result of `get_megatron_optimizer`. Raises UnsupportedState."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    working = [part for part in chained if not getattr(part, "is_stub_optimizer", False)]
    found = [part for part in working if isinstance(part, DistributedOptimizer)]
    if not found or len(found) < len(working):
        kinds = ", ".join(type(part).__name__ for part in chained)
        raise UnsupportedState(f"optimizer: {kinds}; live handoff needs DistributedOptimizers only (ZeRO-1)")
    parts = tuple(part for part in found if part.buffers) or tuple(found[:1])
    chunks = {id(chunk): chunk for part in parts for chunk in part.model_chunks}
    if len(chunks) != 1:
        raise UnsupportedState(f"model chunks: {len(chunks)}; live handoff needs one DDP chunk a rank")
    if parts[0].config.fp16 or any(part.grad_scaler is not None for part in parts):
        raise UnsupportedState("optimizer: fp16 with a gradient scaler is not supported; use bf16 or fp32")
    kinds = list(dict.fromkeys(type(part.optimizer).__name__ for part in parts))
    if len(kinds) > 1:
        raise UnsupportedState(f"optimizers: dense parameters have {kinds[0]}, experts {kinds[1]}; use one for both")
    return OptimizerChain(optimizer, parts)


def discover_kinds(chain: OptimizerChain) -> tuple[StateKind, ...]:
    """master, every moment that the optimizer's class keeps per element, and grad.

    The moments are found by a step of the job's own class (`form_of`), so the code names no optimizer.
    """
    kept = tuple(StateKind(name, FLOAT32) for name in (MASTER, *chain.form.moments))
    return (*kept, StateKind(GRAD, FLOAT32 if chain.ddp_config.grad_reduce_in_fp32 else OF_PARAMETER))


def probe_scalars(chain: OptimizerChain) -> dict[str, Any]:
    """What the optimizer's class keeps per parameter besides moments, with its values before the first step."""
    return {name: 0.0 if torch.is_tensor(value) else value for name, value in chain.form.scalars.items()}
