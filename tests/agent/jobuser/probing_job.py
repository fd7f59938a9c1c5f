"""The reference job, whose first world is not built before it has tried what it can do to its agent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.agent.held_job import SlowJob
from tests.agent.jobuser.probes import about_me, probe


class ProbingJob(SlowJob):
    """Made by the rank's entry from a job file. Its findings are a file in `args["findings"]`, one of each rank."""

    def __init__(self, args: dict[str, Any], **numbers: int) -> None:
        self._findings, self._database = Path(args.pop("findings")), Path(args.pop("database"))
        self._nodes: list[str] = args.pop("nodes")
        super().__init__(args, **numbers)

    def build(self, world: Any) -> Any:
        if world.generation == 1:
            tried = {node: probe(node, self._database) for node in self._nodes}
            written = self._findings / f"{os.getpid()}.new"
            written.write_text(json.dumps({"tried": tried, "me": about_me()}))
            written.rename(self._findings / f"{os.getpid()}.json")
        return super().build(world)
