"""Measures what the live run is compared with: the restart from a checkpoint, and the same job without notices."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.demo import demo_job
from deploy.demo.display import Display
from deploy.demo.report import Reference
from deploy.local.api import until
from deploy.local.processes import Processes, Started

REPEATS = 3
STEPS_OF_A_RESTART = 3
# Many times what a quiet machine takes: a busy one should give slow numbers, not none.
RESTART_S = 400.0
REFERENCE_S = 400.0
OTHER_LAYOUT = demo_job.THREE_NODES_LAYOUT


def compare(
    processes: Processes, folder: Path, display: Display, *, data_prefix: str, layout: str, steps: int
) -> tuple[dict[str, Any], tuple[Reference, Reference]]:
    """Measure the restart on `layout`, then run the job undisturbed in two layouts for as many steps."""
    folder.mkdir(parents=True, exist_ok=True)
    baseline = _restart(processes, folder, display, job=demo_job.job_spec(data_prefix), layout=layout)
    references = _undisturbed(processes, folder, display, job=demo_job.job_spec(data_prefix), steps=steps)
    return baseline, references


def _restart(
    processes: Processes, folder: Path, display: Display, *, job: dict[str, Any], layout: str
) -> dict[str, Any]:
    display.act(f"The same job, stopped and relaunched from a checkpoint as {layout}")
    plan, out = folder / "baseline.json", folder / "baseline-out.json"
    settings = {"job": job, "layout": layout, "folder": str(folder), "repeats": REPEATS, "steps": STEPS_OF_A_RESTART}
    plan.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "deploy.demo.restart.torchrun", str(plan), str(out)]
    started = processes.start("compare", "baseline", command)

    def progress() -> str:
        names = (("as-today", "torchrun, fresh interpreters"), ("at-best", "forked from a warm process"))
        counts = [(len(list((folder / name).glob("world-*/launch.json"))), text) for name, text in names]
        return "; ".join(f"{text}: start {count} of {REPEATS + 1}" for count, text in counts if count)

    _await(processes, started, RESTART_S, lambda: display.note(progress()))
    measured = json.loads(out.read_text())
    for name, text in (("as_today", "as today (torchrun)"), ("at_best", "at best (forked)")):
        display.say(f"{text}: {measured[name]['downtime_s']:.2f} s from the last step to the first forward pass")
    return measured


def _undisturbed(
    processes: Processes, folder: Path, display: Display, *, job: dict[str, Any], steps: int
) -> tuple[Reference, Reference]:
    layouts = (demo_job.FIRST_LAYOUT, OTHER_LAYOUT)
    display.act(f"The same job undisturbed, {steps} steps in {' and in '.join(layouts)}")
    folders = [folder / f"undisturbed-{layout}" for layout in layouts]
    worlds = [
        {"layout": layout, "last_step": steps, "events": str(events), "timeout_s": REFERENCE_S}
        for layout, events in zip(layouts, folders, strict=True)
    ]
    plan = folder / "undisturbed.json"
    plan.write_text(json.dumps({"job": job, "worlds": worlds}))
    command = [sys.executable, "-m", "deploy.demo.restart.one_process", str(plan)]
    started = processes.start("compare", "undisturbed", command)

    def progress() -> str:
        done = [_lines(events / "rank-0.jsonl") for events in folders]
        return "; ".join(f"{layout}: {count} of {steps}" for layout, count in zip(layouts, done, strict=True) if count)

    _await(processes, started, REFERENCE_S, lambda: display.note(progress()))
    first, second = (read_reference(layout, events) for layout, events in zip(layouts, folders, strict=True))
    return first, second


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


def _await(processes: Processes, started: Started, timeout_s: float, look: Callable[[], None]) -> None:
    def ended() -> bool:
        look()
        return started.process.poll() is not None

    until(started.name, timeout_s, ended, lambda: None)
    processes.finish(started, 1.0)


def _lines(path: Path) -> int:
    try:
        return sum(1 for line in path.read_text().splitlines() if '"step"' in line)
    except OSError:
        return 0
