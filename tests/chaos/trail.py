"""The job of a trial, and the trail its ranks leave: each batch computed, each step applied, each probe of the loop.

The trail does not go through agent or service, so it tells what happened whatever became of them. A strike may hold a
rank at a probe: as long as there is a file `hold_file` that names it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from liver_core.rank.loop import RankLoop
from tests.agent.held_job import SlowJob
from tests.chaos.trail_reader import HELD, hold_file

HELD_S_MAX = 20.0
LOOK_S = 0.02


class TrailedJob(SlowJob):
    """Made by the rank's entry from a job file. `args["trail"]`: the folder of the trail. `args["build_s"]`: what each
    world takes longer to build."""

    def __init__(self, args: dict[str, Any], **numbers: int) -> None:
        self._folder = Path(args.pop("trail"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._build_s = float(args.pop("build_s"))
        path = self._folder / f"{os.getpid()}.jsonl"
        self._trail = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        super().__init__(args, **numbers)
        _watch_probes(self._probed)

    def build(self, world: Any) -> Any:
        threading.Event().wait(self._build_s)
        return super().build(world)

    def step(self, state: Any, world: Any, batches: Sequence[Any]) -> Any:
        here = world.coordinates
        ids = [sample for batch in batches for sample in batch.sample_ids]
        first = (here.tp, here.pp) == (0, 0)
        self._note(event="batch", generation=world.generation, dp=here.dp, ids=ids if first else [])
        return super().step(state, world, batches)

    def on_step(self, step: int, loss: float, state: Any, world: Any) -> None:
        self._note(event="applied", generation=world.generation, rank=world.rank, step=step, loss=loss)

    def _probed(self, loop: RankLoop, point: str) -> None:
        following = loop.following
        request = None if following is None else following.request
        ranks = 0 if request is None or request.source is None else request.target.layout.world_size
        is_target = following is not None and following.target_rank is not None
        self._note(event="probe", point=point, handoff=loop.handoff_id, target=is_target, ranks=ranks)
        self._stay_while_held(point)

    def _stay_while_held(self, point: str) -> None:
        file = hold_file(self._folder, os.getpid())
        if not file.exists() or file.read_text() != point:
            return
        self._note(event=HELD, point=point)
        until = time.monotonic() + HELD_S_MAX
        while file.exists() and time.monotonic() < until:
            threading.Event().wait(LOOK_S)

    def _note(self, **line: Any) -> None:
        os.write(self._trail, json.dumps({"at": time.monotonic(), "pid": os.getpid(), **line}).encode() + b"\n")


def _watch_probes(told: Callable[[RankLoop, str], None]) -> None:
    """The loop that this process makes tells of each probe that it passes: the rank's entry gives it none."""
    made = RankLoop.__init__

    def watched(self: RankLoop, *args: Any, **options: Any) -> None:
        made(self, *args, **options | {"probe": lambda point: told(self, point)})

    mock.patch.object(RankLoop, "__init__", watched).start()
