"""The reference job, slower than it is.

SlowJob takes `args["micro_batch_s"]` more for a micro-batch, and leaves the processor to others meanwhile. HeldJob's
second world is not built before a test says so: until `args["held_until"]` is a file. SlowBuildJob takes
`args["build_s"]` for each world but the first. Both are slow jobs too.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from liver_core.training.gpt import GptJob

HELD_S_MAX = 60.0


class SlowJob(GptJob):
    """Made by the rank's entry from a job file."""

    def __init__(self, args: dict[str, Any], **numbers: int) -> None:
        self._micro_batch_s = float(args.pop("micro_batch_s"))
        super().__init__(args, **numbers)

    def forward(self, model: Any, batch: Any) -> Any:
        threading.Event().wait(self._micro_batch_s)
        return super().forward(model, batch)


class HeldJob(SlowJob):
    """Made by the rank's entry from a job file."""

    def __init__(self, args: dict[str, Any], **numbers: int) -> None:
        self._held_until = Path(args.pop("held_until"))
        super().__init__(args, **numbers)

    def build(self, world: Any) -> Any:
        pause, polls = threading.Event(), 0
        while world.generation > 1 and not self._held_until.exists() and polls < HELD_S_MAX / 0.05:
            pause.wait(0.05)
            polls += 1
        return super().build(world)


class SlowBuildJob(SlowJob):
    """Made by the rank's entry from a job file."""

    def __init__(self, args: dict[str, Any], **numbers: int) -> None:
        self._build_s = float(args.pop("build_s"))
        super().__init__(args, **numbers)

    def build(self, world: Any) -> Any:
        if world.generation > 1:
            threading.Event().wait(self._build_s)
        return super().build(world)
