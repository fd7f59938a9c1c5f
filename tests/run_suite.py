"""Runs one suite of tests, says what it took, and holds it to its budget.

    python -m tests.run_suite real -n 3 -m real
    python -m tests.run_suite --ended --began 1795851753 pure service real

A few that fail run once more, alone, so that a reader knows whether the machine had a part in it. The suite has failed
all the same, unless tests/tiers.py lists them as unsteady. Wall and processor seconds go to build/reports/suites.json;
`--ended` prints them for all suites of a run and fails where one is above its budget, which grows with the time that
this machine takes for a fixed piece of work.
"""

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tests import tiers
from tests.durations import parted

AGAIN_MAX = 6  # Of more failures than these none is run again: they are not the machine's.
AGAIN_LIMIT_S = 300.0
FAILED, NO_TEST = 1, 5  # pytest's exit codes: tests failed; none was chosen.
REPORTS = Path("build/reports")
SUITES = REPORTS / "suites.json"
BECOME_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2): orphans of this process's descendants become its children.
RED, PLAIN = "\033[31m", "\033[0m"


class Took(NamedTuple):
    """What one run of a suite took; `cpu_s` over every process that it started."""

    wall_s: float
    cpu_s: float


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--ended"]:
        return ended(arguments[1:])
    name, *rest = arguments
    cache = Path("build/cache") / name
    last_failed = cache / "v/cache/lastfailed"
    last_failed.unlink(missing_ok=True)
    code, took = run([sys.executable, "-m", "pytest", *rest, "-o", f"cache_dir={cache}"])
    note(name, took)
    print(f"suite {name}: {took.wall_s:.0f} s, {took.cpu_s:.0f} processor seconds", flush=True)
    if code != FAILED or not last_failed.exists():
        return 0 if code == NO_TEST else code
    failed = sorted(parted(test)[0] for test in json.loads(last_failed.read_text()))
    if len(failed) > AGAIN_MAX:
        print(f"{len(failed)} tests failed, more than {AGAIN_MAX}: none is run again", flush=True)
        return code
    print(f"\n{len(failed)} failed; each runs again, alone, to tell whether it needs others to fail", flush=True)
    passed_alone = [test for test in failed if not _fails_alone(test)]
    for test in failed:
        why = tiers.UNSTEADY.get(test)
        listed = f"; listed as unsteady: {why}" if why else ""
        print(f"FAILED{', passed alone' if test in passed_alone else ', also alone'}: {test}{listed}", flush=True)
    return 0 if all(test in passed_alone and test in tiers.UNSTEADY for test in failed) else code


def run(command: list[str], limit_s: float | None = None) -> tuple[int, Took]:
    """Run a command, and count what it and all that it started took. Its exit code, FAILED where it was ended."""
    began, before = time.monotonic(), _cpu_of_children_s()
    # Servers that leave their parents, such as PostgreSQL's, are counted too, for it is here that they are waited for.
    ctypes.CDLL(None).prctl(BECOME_SUBREAPER, 1, 0, 0, 0)
    process, code = subprocess.Popen(command), None
    timer = threading.Timer(limit_s or threading.TIMEOUT_MAX, process.kill)
    timer.start()
    while code is None:
        ended_pid, status = os.waitpid(-1, 0)
        if ended_pid == process.pid:
            code = process.returncode = os.waitstatus_to_exitcode(status)
    timer.cancel()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    return FAILED if code < 0 else code, Took(time.monotonic() - began, _cpu_of_children_s() - before)


def note(name: str, took: Took) -> None:
    known = json.loads(SUITES.read_text()) if SUITES.is_file() else {}
    REPORTS.mkdir(parents=True, exist_ok=True)
    SUITES.write_text(json.dumps(known | {name: took._asdict() | {"ended": time.time()}}, indent=2) + "\n")


def ended(arguments: list[str]) -> int:
    """Print what the suites of this run took; 1 where processor seconds are above their budget on this machine."""
    parser = argparse.ArgumentParser(prog="run_suite --ended")
    parser.add_argument("--began", type=float, required=True, help="when the run began, in seconds since 1970")
    parser.add_argument("suites", nargs="+")
    options = parser.parse_args(arguments)
    known = json.loads(SUITES.read_text()) if SUITES.is_file() else {}
    over, slower = False, times_slower()
    print(f"\nbudgets: {slower:.1f} times those of the machine on which they were measured")
    print(f"\n{'suite':<10} {'wall':>7} {'processor':>10} {'budget':>8}")
    for name in options.suites:
        took, budget = known.get(name), tiers.CPU_MAX_S.get(name)
        budget = None if budget is None else budget * slower
        if took is None or took["ended"] < options.began:
            print(f"{name:<10} did not run")
            continue
        above = budget is not None and took["cpu_s"] > budget
        over |= above
        told = f"{name:<10} {took['wall_s']:>5.0f} s {took['cpu_s']:>8.0f} s {f'{budget:.0f} s' if budget else '':>8}"
        print(f"{RED}{told}  above its budget{PLAIN}" if above else told)
    wall_s = time.time() - options.began
    told = f"all, set-up included: {wall_s / 60:.1f} min of {tiers.WALL_MAX_S / 60:.0f}"
    print(f"{RED}{told}: too long{PLAIN}" if wall_s > tiers.WALL_MAX_S else told, flush=True)
    return int(over)


def times_slower() -> float:
    """How many times as long as the machine of the budgets this one takes; 1 where it is faster."""
    return max(1.0, yardstick_s() / tiers.YARDSTICK_S)


def yardstick_s() -> float:
    """Processor seconds of a fixed piece of work, the least of three times."""

    def once() -> float:
        began = time.process_time()
        json.loads(json.dumps([{"number": number, "text": str(number)} for number in range(200_000)]))
        sum(number * number % 7 for number in range(2_000_000))
        return time.process_time() - began

    return min(once() for _ in range(3))


def _fails_alone(test: str) -> bool:
    command = [sys.executable, "-m", "pytest", test, "--thorough", "-n", "0"]
    return run(command, AGAIN_LIMIT_S)[0] != 0


def _cpu_of_children_s() -> float:
    return sum(os.times()[2:4])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
