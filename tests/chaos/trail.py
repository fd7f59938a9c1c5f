"""The job of a trial, and the trail its ranks leave: each batch computed and each step applied, as the job saw it.

The trail does not go through agent or service, so it tells what happened whatever became of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.agent.held_job import SlowJob


class TrailedJob(SlowJob):
    """Made by the rank's entry from a job file. `args["trail"]`: the folder of the trail."""

    def __init__(self, args: dict[str, Any], **numbers: int) -> None:
        folder = Path(args.pop("trail"))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}.jsonl"
        self._trail = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        super().__init__(args, **numbers)

    def step(self, state: Any, world: Any, batches: Sequence[Any]) -> Any:
        here = world.coordinates
        ids = [sample for batch in batches for sample in batch.sample_ids]
        first = (here.tp, here.pp) == (0, 0)
        self._note(event="batch", generation=world.generation, dp=here.dp, ids=ids if first else [])
        return super().step(state, world, batches)

    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        self._note(event="applied", generation=world.generation, rank=world.rank, step=step, loss=loss)

    def _note(self, **line: Any) -> None:
        os.write(self._trail, json.dumps({"at": time.monotonic(), "pid": os.getpid(), **line}).encode() + b"\n")
