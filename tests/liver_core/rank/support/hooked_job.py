"""The reference GPT with hooks that write down when they ran, and with losses that break on order."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from liver_core.training.gpt import GptJob


class HookedJob(GptJob):
    """Each rank appends (hook, step, moment, loss) to a file of its own in the folder `notes`."""

    def __init__(self, args: dict[str, Any], **numbers: Any) -> None:
        self._notes = Path(args["notes"])
        super().__init__({name: value for name, value in args.items() if name != "notes"}, **numbers)

    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        rate = state.optimizer.param_groups[0]["lr"]
        self._note({"hook": "on_step", "step": step, "at": time.time(), "loss": loss, "rate": rate}, world)

    def _note(self, note: dict[str, Any], world: Any) -> None:
        with (self._notes / f"{world.generation}-{world.rank}").open("a") as file:
            file.write(json.dumps(note) + "\n")


def notes_of(folder: Path, generation: int, rank: int) -> list[dict[str, Any]]:
    """What one rank of one world wrote, oldest first."""
    return [json.loads(line) for line in (folder / f"{generation}-{rank}").read_text().splitlines()]
