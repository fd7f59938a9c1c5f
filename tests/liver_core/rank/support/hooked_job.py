"""The reference GPT with hooks that write down when they ran, and with a step whose numbers are not finite."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from liver_core.state import checkpoint
from liver_core.training.gpt import GptJob


class HookedJob(GptJob):
    """Each rank appends (hook, step, moment, loss) to a file of its own in the folder `notes`."""

    def __init__(self, args: dict[str, Any], **numbers: Any) -> None:
        self._notes = Path(args["notes"])
        super().__init__({name: value for name, value in args.items() if name != "notes"}, **numbers)

    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        rate = state.optimizer.param_groups[0]["lr"]
        stream = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        note = {"hook": "on_step", "step": step, "at": time.time(), "loss": loss, "rate": rate, "stream": stream}
        self._note(note, world)

    def validate(self, step: int, state: Any, world: Any) -> None:
        value = torch.rand(1)
        torch.distributed.all_reduce(value, group=world.everyone)
        self._note({"hook": "validate", "step": step, "at": time.time()}, world)

    def _note(self, note: dict[str, Any], world: Any) -> None:
        with (self._notes / f"{world.generation}-{world.rank}").open("a") as file:
            file.write(json.dumps(note) + "\n")


class StuckJob(HookedJob):
    """Rank 0 writes no more of the checkpoint of step 2 before step 6 is made, and then raises what nobody foresaw."""

    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        super().on_step(step, loss, state, world)
        if step == 1 and world.rank == 0:
            self._stick(world)
        if step == 6 and world.rank == 0:
            self._go_on.set()

    def _stick(self, world: Any) -> None:
        self._go_on = threading.Event()
        save = checkpoint._save

        def stuck(*_: Any) -> None:
            checkpoint._save = save
            assert self._go_on.wait(60)
            raise RuntimeError("a disk that comes back")

        checkpoint._save = stuck


class ReportingJob(HookedJob):
    """Reports numbers of its own; that of every second step is not a number."""

    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        super().on_step(step, loss, state, world)
        self.report(step, {"own/half": step / 2, "own/odd": float("nan") if step % 2 else torch.ones(1)})

    def validate(self, step: int, state: Any, world: Any) -> None:
        super().validate(step, state, world)
        self.report(step, {"validation": 10 * step})


class NonfiniteJob(HookedJob):
    """In step `bad_step` the first micro-batch has a `bad` loss (NaN), or a finite loss with a gradient of NaN."""

    def __init__(self, args: dict[str, Any], **numbers: Any) -> None:
        self._bad, self._bad_step = args["bad"], args["bad_step"]
        super().__init__({name: value for name, value in args.items() if not name.startswith("bad")}, **numbers)

    def samples(self, sample_ids: Sequence[int]) -> dict[str, Any]:
        is_bad = sample_ids[0] == (self._bad_step - 1) * self.global_batch
        return {**super().samples(sample_ids), "is_bad": is_bad}

    def loss(self, output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        loss = super().loss(output, batch)
        if not batch["is_bad"]:
            return loss
        # The derivative of a root at zero is infinite, and that of the difference below is zero.
        return loss * float("nan") if self._bad == "loss" else loss + (loss - loss.detach()).abs().sqrt()


def notes_of(folder: Path, generation: int, rank: int) -> list[dict[str, Any]]:
    """What one rank of one world wrote, oldest first."""
    return [json.loads(line) for line in (folder / f"{generation}-{rank}").read_text().splitlines()]
