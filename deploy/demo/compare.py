"""Measures what the live run is compared with: the restart from a checkpoint, and the same job without notices."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.gpus import gpus_of_node
from deploy.demo.demo_job import DemoJob
from deploy.demo.display import Display
from deploy.demo.report import Reference
from deploy.local.api import until
from deploy.local.processes import Processes
from liver_core.gpu_environment import VISIBLE

REPEATS = 3
STEPS_OF_A_RESTART = 3
# Many times what a quiet machine takes: a busy one should give slow numbers, not none.
RESTART_S = 400.0
REFERENCE_S = 400.0


class WithoutAgents:
    """The same job without service and agents. `folder`: for plans, events and logs. `device`: what the live run
    trained on."""

    def __init__(
        self, processes: Processes, folder: Path, display: Display, job: DemoJob, data_prefix: str, device: str
    ) -> None:
        self._processes = processes
        self._folder = folder
        self._display = display
        self._layouts = (job.first_layout, job.other_layout)
        self._job = job.spec(data_prefix)
        self._environment = {VISIBLE: ",".join(gpus_of_node(device, os.environ))}
        folder.mkdir(parents=True, exist_ok=True)

    def restart(self, layout: str) -> dict[str, Any]:
        """What a stop and a relaunch from a checkpoint take, both ways."""
        self._display.act(f"The same job, stopped and relaunched from a checkpoint as {layout}")
        folder, out = self._folder, self._folder / "baseline-out.json"
        settings = {"job": self._job, "layout": layout, "folder": str(folder), "repeats": REPEATS}
        self._run("torchrun", "baseline", settings | {"steps": STEPS_OF_A_RESTART}, RESTART_S, self._starts, str(out))
        measured = json.loads(out.read_text())
        for name, text in (("as_today", "as today (torchrun)"), ("at_best", "at best (forked)")):
            downtime = f"{measured[name]['downtime_s']:.2f} s from the last step to the first forward pass"
            self._display.say(f"{text}: {downtime}")
        return measured

    def undisturbed(self, steps: int) -> tuple[Reference, Reference]:
        """So many steps without a notice, in the first layout and in another."""
        layouts = self._layouts
        self._display.act(f"The same job undisturbed, {steps} steps in {' and in '.join(layouts)}")
        folders = {layout: self._folder / f"undisturbed-{layout}" for layout in layouts}
        worlds = [
            {"layout": layout, "last_step": steps, "events": str(events), "timeout_s": REFERENCE_S}
            for layout, events in folders.items()
        ]

        def progress() -> str:
            done = {layout: _lines(events / "rank-0.jsonl") for layout, events in folders.items()}
            return "; ".join(f"{layout}: {count} of {steps}" for layout, count in done.items() if count)

        self._run("one_process", "undisturbed", {"job": self._job, "worlds": worlds}, REFERENCE_S, progress)
        first, second = (read_reference(layout, events) for layout, events in folders.items())
        return first, second

    def _starts(self) -> str:
        names = (("as-today", "torchrun, fresh interpreters"), ("at-best", "forked from a warm process"))
        counts = [(len(list((self._folder / name).glob("world-*/launch.json"))), text) for name, text in names]
        return "; ".join(f"{text}: start {count} of {REPEATS + 1}" for count, text in counts if count)

    def _run(
        self, module: str, name: str, plan: dict[str, Any], timeout_s: float, progress: Callable[[], str], *more: str
    ) -> None:
        file = self._folder / f"{name}.json"
        file.write_text(json.dumps(plan))
        command = [sys.executable, "-m", f"deploy.demo.restart.{module}", str(file), *more]
        started = self._processes.start("compare", name, command, self._environment)

        def ended() -> bool:
            self._display.note(progress())
            return started.process.poll() is not None

        until(name, timeout_s, ended, lambda: None)
        self._processes.finish(started, 1.0)


def read_reference(layout: str, folder: Path) -> Reference:
    """The steps that rank 0 of an undisturbed run recorded."""
    losses, digests, seconds = {}, {}, {}
    for line in (folder / "rank-0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            losses[event["step"]] = event["loss"]
            digests[event["step"]] = event["sample_digest"]
            seconds[event["step"]] = event["seconds"]
    return Reference(layout, losses, digests, seconds)


def _lines(path: Path) -> int:
    try:
        return sum(1 for line in path.read_text().splitlines() if '"step"' in line)
    except OSError:
        return 0
