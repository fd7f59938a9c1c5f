"""Measures the restart that a live handoff is compared with: save the job, end it, start it from its checkpoint.

Measured in two ways. *As today*: torchrun, fresh interpreters, a plain Megatron script. *At best*: ranks forked from a
process that has imported everything. The restart gets every advantage: checkpoint in memory (tmpfs), warm page cache,
Megatron's slow save queue replaced. Numbers are differences of wall clock times that ranks recorded.
Reads one JSON file, writes one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from deploy.demo.restart.one_process import LAUNCH_FILE, JobSpec, WorldSpec, WorldsPlan, note_launch, read_events
from liver_core.layout import ParallelLayout

MEMORY_FOLDER = Path("/dev/shm")
MEMORY_BYTES_MIN = 256 * 1024 * 1024
# The moments that cut a restart into phases, in order; a phase is named by the moment that ends it.
_MOMENTS = ("step_end", "save", "teardown", "start", "imports", "init_and_build", "load", "enter")


class BaselineFailed(RuntimeError):
    """A restart could not be measured; the text says which process failed and where its output is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSettings:
    """`steps`: optimizer steps of each world. `folder`: for events and logs. `timeout_s`: for one world."""

    job: JobSpec
    layout: str
    folder: Path
    repeats: int = 3
    steps: int = 3
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart: from the end of the last optimizer step to the first forward pass; the first step comes after it."""

    downtime_s: float
    phases_s: dict[str, float]
    first_step_s: float


def measure_as_today(settings: BaselineSettings) -> dict[str, Any]:
    """Restarts under torchrun. Raises BaselineFailed. The first world only fills the page cache and saves."""
    with _worlds(settings, "as-today") as worlds:
        job_file = settings.folder / "as-today" / "job.json"
        job_file.write_text(json.dumps(asdict(settings.job)))
        for world in worlds:
            _torchrun(settings, job_file, world)
        return _summary([_restart(old, new) for old, new in pairwise(worlds)])


def measure_at_best(settings: BaselineSettings) -> dict[str, Any]:
    """Restarts whose ranks are forked from one warm process. Raises BaselineFailed."""
    with _worlds(settings, "at-best") as worlds:
        plan = settings.folder / "at-best" / "plan.json"
        plan.write_text(WorldsPlan(job=settings.job, worlds=tuple(worlds)).to_json())
        run_plan(plan, timeout_s=settings.timeout_s * len(worlds))
        return _summary([_restart(old, new) for old, new in pairwise(worlds)])


def run_plan(plan: Path, *, timeout_s: float) -> None:
    """Run the worlds of a plan file in a process of its own. Raises BaselineFailed."""
    _run([sys.executable, "-m", "deploy.demo.restart.one_process", str(plan)], plan.with_suffix(".log"), timeout_s)


@contextmanager
def _worlds(settings: BaselineSettings, name: str) -> Iterator[list[WorldSpec]]:
    """One more world than restarts. Each continues from the checkpoint of the one before; the last saves none.

    Checkpoints are removed at the end.
    """
    if not MEMORY_FOLDER.is_dir() or shutil.disk_usage(MEMORY_FOLDER).free < MEMORY_BYTES_MIN:
        raise BaselineFailed(f"{MEMORY_FOLDER}: needs {MEMORY_BYTES_MIN // 1024**2} MiB free for checkpoints in memory")
    checkpoints = Path(tempfile.mkdtemp(prefix="liver-baseline-", dir=MEMORY_FOLDER))
    try:
        worlds, saved = [], None
        for number in range(settings.repeats + 1):
            last_step = (number + 1) * settings.steps
            world = WorldSpec(
                layout=settings.layout,
                last_step=last_step,
                events=str(settings.folder / name / f"world-{number}"),
                timeout_s=settings.timeout_s,
                checkpoint=saved,
                save_to=str(checkpoints) if number < settings.repeats else None,
            )
            Path(world.events).mkdir(parents=True, exist_ok=True)
            saved = f"{checkpoints}/step-{last_step:09d}"
            worlds.append(world)
        yield worlds
    finally:
        shutil.rmtree(checkpoints, ignore_errors=True)


def _torchrun(settings: BaselineSettings, job_file: Path, world: WorldSpec) -> None:
    folder = Path(world.events)
    world_file = folder / "world.json"
    world_file.write_text(json.dumps(asdict(world)))
    ranks = ParallelLayout.parse(world.layout).world_size
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "deploy.demo.restart.torchrun_rank", str(job_file), str(world_file)]
    note_launch(folder)
    _run(command, folder / "torchrun.log", settings.timeout_s)


def _run(command: list[str], log_path: Path, timeout_s: float) -> None:
    """Run in a session of its own, so that nothing it starts outlives it."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    name = " ".join(command[1:4])
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BaselineFailed(f"{name} did not end within {timeout_s:.0f} s; see {log_path}") from None
        finally:
            _end_session(process)
    if status:
        raise BaselineFailed(f"{name} ended with status {status}: {_last_error(log_path)}; see {log_path}")


def _last_error(log_path: Path) -> str:
    """The first line that names an exception or a signal: later lines are mostly its consequences."""
    lines = log_path.read_text(errors="replace").splitlines()
    named = [line for line in lines if re.search(r"\w(Error|Exception|Failed|Moved): +\S|[Ss]ignal \d+ \(SIG", line)]
    return (named or lines or ["no output"])[0 if named else -1][:500]


def _end_session(process: subprocess.Popen) -> None:
    """Kill what is left of the session that `process` leads."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


# From times to durations.


def _restart(old: WorldSpec, new: WorldSpec) -> Restart:
    moments = _ending(old) | _beginning(new)
    present = [name for name in _MOMENTS if name in moments]
    phases = {name: moments[name] - moments[before] for before, name in pairwise(present)}
    return Restart(moments["enter"] - moments["step_end"], phases, moments["first_step"])


def _ending(world: WorldSpec) -> dict[str, float]:
    """When the slowest rank of a world finished its last step, and when its checkpoint was complete."""
    events = read_events(world.events)
    step_end = max(_one(events[rank], "step", step=world.last_step)["at"] for rank in events)
    saved = max(event["at"] for rank in events for event in events[rank] if event["event"] == "saved")
    return {"step_end": step_end, "save": saved}


def _beginning(world: WorldSpec) -> dict[str, float]:
    """The moments of a start, each at its slowest rank, and the seconds of the first step."""
    events = read_events(world.events)
    moments = {"teardown": json.loads((Path(world.events) / LAUNCH_FILE).read_text())["at"]}
    first_steps = []
    for own in events.values():
        found = _forked(own) if any(event["event"] == "stage" for event in own) else _plain(own)
        first_steps.append(next(event["seconds"] for event in own if event["event"] == "step"))
        for name, at in found.items():
            moments[name] = max(moments.get(name, 0.0), at)
    return moments | {"first_step": max(first_steps)}


def _plain(own: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "start": _one(own, "worker_started")["started_at"],
        "imports": _one(own, "imported")["at"],
        "init_and_build": _one(own, "built")["at"],
        "load": _one(own, "loaded")["at"],
        "enter": next(event["at"] for event in own if event["event"] == "forward"),
    }


def _forked(own: list[dict[str, Any]]) -> dict[str, float]:
    prepared = _one(own, "stage", stage="prepared")
    return {
        "start": _one(own, "worker_started")["at"],
        "init_and_build": prepared["at"] - prepared["measures"]["load_state_s"],
        "load": prepared["at"],
        "enter": _one(own, "stage", stage="active")["measures"]["first_forward_at_utc"],
    }


def _one(own: list[dict[str, Any]], event: str, **wanted: Any) -> Mapping[str, Any]:
    for found in own:
        if found["event"] == event and all(found.get(name) == value for name, value in wanted.items()):
            return found
    raise BaselineFailed(f"no event {event} {wanted or ''} among {[found['event'] for found in own]}")


def _summary(restarts: list[Restart]) -> dict[str, Any]:
    """The best restart, and the spread over all of them."""
    best = min(restarts, key=lambda restart: restart.downtime_s)
    downtimes = [restart.downtime_s for restart in restarts]
    return {
        "downtime_s": best.downtime_s,
        "phases_s": best.phases_s,
        "first_step_s": best.first_step_s,
        "spread_s": {"min": min(downtimes), "median": statistics.median(downtimes), "max": max(downtimes)},
        "repeats": [asdict(restart) for restart in restarts],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both ways. `plan`: the fields of BaselineSettings as JSON. The status is 1 when it cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.restart.torchrun", description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    plan = json.loads(options.plan.read_text())
    settings = BaselineSettings(**plan | {"job": JobSpec(**plan["job"]), "folder": Path(plan["folder"])})
    try:
        measured = {"as_today": measure_as_today(settings), "at_best": measure_at_best(settings)}
    except BaselineFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    options.out.write_text(json.dumps({"layout": settings.layout, **measured}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
