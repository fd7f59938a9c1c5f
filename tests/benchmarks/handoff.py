"""Measures handoffs side by side: live, stop-and-copy, and the restart from a checkpoint that they replace.

Run from the root of the tree: python -m tests.benchmarks.handoff [--sizes 16MB,64MB] [--changes shrink,grow,reshape]
[--repeats N] [--modes live,stop_and_copy,restart,steady] [--device-time] [--report FILE]. Without --repeats the sizes
of REPEATED run five times and all others once. The tree must not change meanwhile: ranks import some modules late. A
case that fails is in the report with its reason, and the status is then 1; a missed target is in the report and leaves
the status alone. With --device-time the host is idle for most of each step, in handoffs and restarts alike.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.demo.restart.one_process import JobSpec
from deploy.demo.restart.torchrun import BaselineFailed, BaselineSettings, measure_as_today, measure_at_best
from liver_core.handoff.messages import Rung
from tests.benchmarks import handoff_report as report
from tests.benchmarks.circumstances import circumstances, end_when_told
from tests.benchmarks.device_time import IDLE_SHARE, LABEL, device_s
from tests.benchmarks.handoff_cluster import Measured, limit_s, run_changes
from tests.benchmarks.handoff_model import (
    CHANGES,
    EXPERTS,
    GLOBAL_BATCH,
    SEED,
    Model,
    memory_needed,
    model_of,
    parse_bytes,
    restart_memory_needed,
)
from tests.benchmarks.handoff_raw import raw_bandwidth
from tests.benchmarks.handoff_spans import measure_steady

SIZES = "16MB,64MB,256MB,1GB,4GB"
REPEATED = ("64MB", "1GB")
REPEATS = 5
RUNGS = {"live": Rung.LIVE, "stop_and_copy": Rung.STOP_AND_COPY}
MODES = (*RUNGS, "restart", "steady")
CORPUS_BYTES, CORPUS_S = 3_000_000, 180.0
RESTART_STEPS = 3
MEMORY_MARGIN = 1.1
"""What is free must be more than what is needed: the kernel kills without asking."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `repeats` None: as the module says."""

    sizes: tuple[str, ...]
    changes: tuple[str, ...]
    modes: tuple[str, ...]
    repeats: int | None
    report: Path
    device_time: bool
    experts: int = 0

    def repeats_of(self, size: str) -> int:
        return self.repeats or (REPEATS if size in REPEATED else 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the report after every size, print it. 1 where a case failed, 2 where it was never begun."""
    options = parse(arguments)
    started = time.monotonic()
    where = circumstances("tests.benchmarks.handoff")
    found: dict[str, Any] = {"cases": [], "raw_bandwidth": {}, "steady": {"by_size": []}, **where}
    with tempfile.TemporaryDirectory(prefix="liver-bench-") as folder:
        prefix = build_corpus(Path(folder))
        for size in options.sizes:
            model = model_of(parse_bytes(size), options.experts)
            if options.device_time:
                model = with_device_time(model, size, prefix, found)
            print(f"{size}: {model.parameters} parameters, {model.state_bytes} bytes of state", flush=True)
            measure_size(model, size, options, prefix=prefix, found=found)
            finish(found, time.monotonic() - started)
            options.report.parent.mkdir(parents=True, exist_ok=True)
            options.report.write_text(json.dumps(found, indent=1))
    label = [f"In all of this {LABEL}."] if options.device_time else []
    print("\n".join([*label, *report.table(found["cases"]), "", *report.verdicts(found["targets"])]))
    print(f"{options.report}: {found['seconds']:.0f} s, load average {found['load_average_at_start']} at start")
    return 1 if any(each["target"] == "no failure" and not each["met"] for each in found["targets"]) else 0


def parse(arguments: Sequence[str] | None) -> Options:
    """Options of a command line. Exits where one of them means nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help=f"bytes of state, default {SIZES}")
    parser.add_argument("--changes", default=",".join(change.name for change in CHANGES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--report", type=Path, default=Path("build/reports/handoff.json"))
    parser.add_argument("--experts", action="store_true", help=f"of a model with {EXPERTS} experts a layer")
    parser.add_argument("--device-time", action="store_true", help=LABEL.replace("%", "%%"))
    given = parser.parse_args(arguments)
    sizes, changes, modes = (tuple(getattr(given, name).split(",")) for name in ("sizes", "changes", "modes"))
    for name, values, known in (("changes", changes, [each.name for each in CHANGES]), ("modes", modes, MODES)):
        for value in set(values) - set(known):
            parser.error(f"--{name}: {value!r} is none of {', '.join(known)}")
    if given.repeats is not None and given.repeats < 1:
        parser.error(f"--repeats: {given.repeats} is less than 1")
    for size in sizes:
        try:
            model_of(parse_bytes(size), EXPERTS if given.experts else 0)
        except ValueError as error:
            parser.error(f"--sizes: {error}")
    experts = EXPERTS if given.experts else 0
    return Options(sizes, changes, modes, given.repeats, given.report, given.device_time, experts)


def build_corpus(folder: Path) -> str:
    """Prefix of the corpus that all ranks train on. Raises CalledProcessError or TimeoutExpired."""
    prefix = str(folder / "corpus")
    command = [sys.executable, "-m", "liver_core.training.corpus", "--out", prefix, "--bytes-max", str(CORPUS_BYTES)]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=CORPUS_S, capture_output=True, env=environment)
    return prefix


def with_device_time(model: Model, size: str, prefix: str, found: dict[str, Any]) -> Model:
    """The same model, whose job sleeps in every step for several times its own step as it is measured now. Raises
    RuntimeError where it cannot be measured."""
    names = [change.name for change in model.changes]
    measured = run_changes(model, prefix, Rung.STOP_AND_COPY, changes=names, repeats=1, say=_say)
    failures = [reason for each in measured.values() for reason in each.failures]
    if failures:
        raise RuntimeError(f"{size}: the job's own step could not be measured: {failures[0]}")
    cpu_step_s = {change.source: measured[change.name].repeats[0]["step_s"] for change in model.changes}
    sleeping_s = device_s(cpu_step_s)
    device_time = found.setdefault("device_time", {"label": LABEL, "idle_share": IDLE_SHARE, "by_size": {}})
    device_time["by_size"][size] = {"cpu_step_s": cpu_step_s, "device_s": sleeping_s}
    _say(f"  own steps {cpu_step_s}; from here on {LABEL}")
    return replace(model, device_s=tuple(sleeping_s.items()))


def measure_size(model: Model, size: str, options: Options, *, prefix: str, found: dict[str, Any]) -> None:
    """Add the cases of one size to what was found: its raw bandwidth first, then one mode after the other."""
    repeats = options.repeats_of(size)
    raw = _tried(lambda: {**raw_bandwidth(), "load_average": os.getloadavg()[0]})
    found["raw_bandwidth"][size] = raw
    modes = {}
    for name, rung in RUNGS.items():
        if name not in options.modes:
            continue
        refusal = refused(name, memory_needed(model, name))
        if refusal:
            modes[name] = {change: Measured(failures=[refusal]) for change in options.changes}
        else:
            modes[name] = run_changes(model, prefix, rung, changes=options.changes, repeats=repeats, say=_say)
    restarts = measure_restarts(model, options, repeats, prefix) if "restart" in options.modes else {}
    if "steady" in options.modes:
        found["steady"]["by_size"].append(steady(model, prefix))
    for change in options.changes:
        found["cases"].append(
            report.case(
                model.state_bytes,
                change,
                live=modes.get("live", {}).get(change),
                copied=modes.get("stop_and_copy", {}).get(change),
                restart=restarts.get(change),
                raw_bytes_per_s=raw.get("bytes_per_s"),
            )
        )


def steady(model: Model, prefix: str) -> dict[str, Any]:
    """Steps of one size while no handoff runs; what failed says so."""
    refusal = refused("live", memory_needed(model, "live"))
    if refusal:
        return {"state_bytes": model.state_bytes, "failed": [refusal]}
    with tempfile.TemporaryDirectory(prefix="liver-bench-spans-") as folder:
        measured = _tried(lambda: measure_steady(model, prefix, Path(folder)))
    return {"state_bytes": model.state_bytes, **measured}


def measure_restarts(model: Model, options: Options, repeats: int, prefix: str) -> dict[str, Any]:
    """Change -> the restart in its target layout, from a checkpoint in memory."""
    job = JobSpec(
        entrypoint=model.entrypoint,
        args=model.arguments(prefix),
        global_batch=GLOBAL_BATCH,
        micro_batch=model.micro_batch,
        seed=SEED,
    )
    found = {}
    for change in (each for each in model.changes if each.name in options.changes):
        refusal = refused("restart", restart_memory_needed(model, change.target, repeats))
        if refusal:
            found[change.name] = {"downtime_s": None, "failed": [refusal]}
            continue
        with tempfile.TemporaryDirectory(prefix="liver-bench-restart-") as folder:
            settings = BaselineSettings(
                job=job,
                layout=change.target,
                folder=Path(folder),
                repeats=repeats,
                steps=RESTART_STEPS,
                timeout_s=limit_s(model),
            )
            found[change.name] = _tried(lambda settings=settings: restart(settings))
        _say(f"  restart in {change.target}: {found[change.name]['downtime_s']} s")
    return found


def restart(settings: BaselineSettings) -> dict[str, Any]:
    """Downtimes, medians of all repeats: with torchrun and fresh interpreters, and forked from a warm process."""
    today, best = measure_as_today(settings), measure_at_best(settings)
    return {
        "downtime_s": today["spread_s"]["median"],
        "warm_downtime_s": best["spread_s"]["median"],
        "layout": settings.layout,
        "as_today": today,
        "at_best": best,
    }


def refused(mode: str, needed: int) -> str:
    """Why a mode that needs so many bytes does not fit into this machine, with numbers, or nothing."""
    free = memory_available()
    if MEMORY_MARGIN * needed <= free:
        return ""
    return f"{mode} needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are available: not begun"


def memory_available() -> int:
    """Bytes that new processes may take, as the kernel says."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def finish(found: dict[str, Any], seconds: float) -> None:
    """What follows from the cases."""
    steady_of = [each for each in found["steady"]["by_size"] if "failed" not in each]
    found["steady"]["span_share"] = max((each["span_share"] for each in steady_of), default=None)
    found["steady"]["bytes_copied_idle"] = sum(each["bytes_copied_idle"] for each in steady_of) if steady_of else None
    limits = report.DEVICE_TIME if "device_time" in found else report.ON_HOST
    found["targets"] = report.targets(found["cases"], found["steady"]["by_size"], limits)
    found["seconds"] = seconds
    found["load_average_at_end"] = [round(each, 2) for each in os.getloadavg()]


def _tried(measure: Any) -> dict[str, Any]:
    """What could be measured, or why not."""
    try:
        return measure()
    except (BaselineFailed, AssertionError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = f"{type(error).__name__}: {str(error).strip()[-600:]}"
        _say(f"  FAILED {reason}")
        return {"downtime_s": None, "failed": [reason]}


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
