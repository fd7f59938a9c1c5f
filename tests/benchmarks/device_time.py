"""A reference job whose host is idle for most of each step, as on a machine whose steps a device does.

Every rank sleeps at the start of its step, all at the same time, for four times that job's own step in the same layout,
measured in the same run. What preparing a handoff takes from training then shows as where the host is free. It says
nothing about the memory, the links or the queues of a device.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from liver_core.layout import ParallelLayout
from liver_core.training.gpt import GptJob
from liver_core.training.job import MicroBatch, StepResult, TrainState
from liver_core.worlds.megatron import MegatronWorld

IDLE_SHARE = 0.8
LABEL = f"the host sleeps for {IDLE_SHARE:.0%} of each step in place of a device"


def device_s(cpu_step_s: Mapping[str, float]) -> dict[str, float]:
    """Layout -> seconds to sleep in each step, so that sleeping is IDLE_SHARE of it. `cpu_step_s`: seconds of the
    job's own step in each layout."""
    factor = IDLE_SHARE / (1 - IDLE_SHARE)
    return {str(ParallelLayout.parse(layout)): factor * seconds for layout, seconds in cpu_step_s.items()}


class DeviceTimeJob(GptJob):
    """`args["device_s"]`: layout -> seconds, of every layout that the job runs in; the rest is GptJob's."""

    def __init__(self, args: dict[str, Any], **numbers: int) -> None:
        rest = dict(args)
        self._device_s: dict[str, float] = dict(rest.pop("device_s"))
        super().__init__(rest, **numbers)

    def check_layout(self, layout: ParallelLayout) -> None:
        super().check_layout(layout)
        if str(layout) not in self._device_s:
            raise ValueError(f"device_s: has no seconds for layout {layout}, only for {', '.join(self._device_s)}")

    def step(self, state: TrainState, world: MegatronWorld, batches: Sequence[MicroBatch]) -> StepResult:
        threading.Event().wait(self._device_s[str(world.layout)])
        return super().step(state, world, batches)
