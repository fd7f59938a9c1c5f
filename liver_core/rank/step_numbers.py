"""What the host reads from the device in a step: the loss and the gradient norm, at once and only here.

Each read would wait for all that the device has to do. What is decided at a boundary goes over gloo, in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from liver_core.device import read
from liver_core.state.optimizer_step import norm_of
from liver_core.training.job import StepResult


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """`result`: its loss as a float. `norm`: of the gradients, over the world."""

    result: StepResult
    norm: float


def read_numbers(result: StepResult, squared_norm: torch.Tensor) -> StepNumbers:
    """`squared_norm`: what `start_norm` gave. Waits for what this thread has queued on its device, once."""
    loss = result.loss_sum
    if not isinstance(loss, torch.Tensor) or loss.device != squared_norm.device:
        (squared,) = read(squared_norm.reshape(1))
        return StepNumbers(replace(result, loss_sum=float(loss)), norm_of(squared))
    loss_sum, squared = read(torch.cat([loss.detach().reshape(1).double(), squared_norm.reshape(1).double()]))
    return StepNumbers(replace(result, loss_sum=loss_sum), norm_of(squared))
