"""Runs the product on the device of this machine, part by part, within eight minutes: python -m tests.gpu.check

Each part is a process of its own with a limit of its own, and `gpu.json` is written anew after each, so that whatever
ends the run, what came before stands. Needs nothing but the standard library itself, and so can say what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.gpu.mps import mps

TOTAL_S = 480.0
REASON_LINES = 12
DEVICES = ("cuda", "cpu")
PATIENCE = {"cuda": 1, "cpu": 4}
"""How many times its limit a part may take. A rehearsal shares few cores with others."""


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Part:
    """A module of `tests.gpu` with a function `run(device) -> Finding`, and how long it may take. The limits together
    may be longer than `TOTAL_S`: they are for the part that hangs."""

    name: str
    limit_s: float
    about: str

    @property
    def module(self) -> str:
        return f"tests.gpu.{self.name}_part"


PARTS = (
    Part("machine", 40, "what this machine has, and what is missing"),
    Part("stream", 90, "one-sided reads between two processes on one device: edges, bandwidth, step time"),
    Part("collectives", 40, "each collective that Megatron uses, over the groups that ranks make"),
    Part("job", 130, "reference job by stop-and-copy and live, over host memory, with stages; both oracles"),
    Part("certificate", 30, "hashes on the device: the bits that numpy finds, and speed"),
    Part("steps", 100, "step time of the reference job with and without a handoff beside it, and pauses"),
    Part("product", 200, "service, agents and a job that loses, gains and loses nodes, beside the device"),
    Part("several", 50, "TP2xPP2 to PP3 and back, a GPU for each rank"),
    Part("relay", 60, "reads over a stream relay while the source rewrites: edges, bandwidth, step time"),
    Part("experts", 90, "reference job with experts and a bias, live and by stop-and-copy; both oracles"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a part says of itself. `reason`: a sentence, whatever the verdict."""

    verdict: Verdict
    reason: str
    found: dict[str, Any] = field(default_factory=dict)
    ends_the_run: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 if nothing failed, 1 if a part failed or was late, 2 for a wrong option."""
    options = parse(arguments)
    if options.one is not None:
        return run_here(options.one, options.device, options.report)
    chosen = tuple(part for part in PARTS if part.name in options.parts)
    with mps() if options.mps else contextlib.nullcontext("for the part stream only") as served:
        findings = run_parts(chosen, options.device, options.report, served=served)
    bad = [name for name, finding in findings.items() if finding.verdict in (Verdict.FAILED, Verdict.LATE)]
    print(f"{len(findings)} parts, {len(bad)} failed or late{': ' + ', '.join(bad) if bad else ''}; {options.report}")
    return int(bool(bad))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Ends the program with a sentence about what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="cpu rehearses the same parts without a GPU")
    parser.add_argument("--parts", help=f"some of {','.join(part.name for part in PARTS)}; without it, all")
    parser.add_argument("--mps", action="store_true", help="run all parts under MPS, so that ranks need not take turns")
    parser.add_argument("--report", type=Path, default=Path("build/reports/gpu.json"))
    parser.add_argument("--one", choices=[part.name for part in PARTS], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    known = [part.name for part in PARTS]
    options.parts = known if options.parts is None else options.parts.split(",")
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"--parts: there is no part {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def run_parts(
    chosen: Sequence[Part], device: str, report: Path, total_s: float = TOTAL_S, *, served: str = ""
) -> dict[str, Finding]:
    """Run them in turn, and keep `report` complete after each. Parts that no time is left for are skipped."""
    patience, findings, over = PATIENCE[device], {}, ""
    deadline = time.monotonic() + total_s * patience
    whole: dict[str, Any] = {
        "device": device,
        "label": "GPU" if device == "cuda" else "rehearsal on a CPU: says nothing of a GPU",
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "mps": served,
        "parts": {},
    }
    report.parent.mkdir(parents=True, exist_ok=True)
    for part in chosen:
        began, left_s = time.monotonic(), deadline - time.monotonic()
        if not over and left_s < 1:
            over = f"the {total_s:.0f} s of the whole run are over"
        log = report.with_name(f"{report.stem}-{part.name}.log")
        limit_s = min(part.limit_s * patience, left_s)
        finding = Finding(Verdict.SKIPPED, over) if over else run_apart(part, device, log, limit_s)
        if finding.ends_the_run:
            over = f"{part.name}: {finding.reason}"
        findings[part.name] = finding
        seconds = round(time.monotonic() - began, 1)
        whole["parts"][part.name] = {"about": part.about, "seconds": seconds, **asdict(finding)}
        write_whole(report, whole)
        print(f"{part.name:12} {finding.verdict:8} {seconds:6.1f} s  {finding.reason.splitlines()[0]}", flush=True)
    return findings


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Whoever reads `path` finds the content before or this one, never a half."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)


def run_apart(part: Part, device: str, log: Path, limit_s: float) -> Finding:
    """Run one part in a session of its own, of which nothing is left afterwards. What it prints goes to `log`."""
    said = log.with_suffix(".said")
    said.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.check", "--one", part.name, "--device", device, "--report", str(said)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(device), start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    try:
        told = json.loads(said.read_text())
        finding = Finding(**told | {"verdict": Verdict(told["verdict"])})
    except FileNotFoundError:
        finding = None
    said.unlink(missing_ok=True)
    if finding is not None:
        return finding
    end = last_lines(log)
    if status is None:
        return Finding(Verdict.LATE, f"did not end within {limit_s:.0f} s\n{end}")
    return Finding(Verdict.FAILED, f"ended with status {status} and said nothing\n{end}")


def environment(device: str) -> dict[str, str]:
    """What a part starts with."""
    changed = {
        "PYTHONUNBUFFERED": "1",
        # A rank that a library kills says where.
        "PYTHONFAULTHANDLER": "1",
        # The other check makes a context, and a process that has one cannot fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if device == "cpu":
        changed["CUDA_VISIBLE_DEVICES"] = ""
    return os.environ | changed


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the part and all that it started, and wait for the part itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-REASON_LINES:])


def run_here(name: str, device: str, said: Path) -> int:
    """In the process of one part: run it, and leave what it found in a file."""
    part = next(part for part in PARTS if part.name == name)
    try:
        finding: Finding = importlib.import_module(part.module).run(device)
    except Exception as error:
        traceback.print_exc()
        text = traceback.format_exc().splitlines()
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        finding = Finding(Verdict.FAILED, "\n".join([first, *text[-REASON_LINES:]]))
    write_whole(said, asdict(finding))
    return 0


if __name__ == "__main__":
    # The parts know this module by its name, and so must the classes be.
    sys.exit(importlib.import_module("tests.gpu.check").main())
