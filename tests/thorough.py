"""`make test-thorough`: everything that `make test` leaves out, in parts that can be chosen.

    python -m tests.thorough                          all of it
    python -m tests.thorough rank sim                 these parts
    python -m tests.thorough --touched-since BASE --minutes 20
                                                      what a change touches, nearest first, as far as it fits

A part that fails does not keep the others from running. The end says what failed, what was left out and how long each
part took.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests import tiers
from tests.durations import known_seconds
from tests.run_suite import times_slower
from tests.touched import changed_since, default_base, reached

ROOT = Path(__file__).resolve().parent.parent
WORKERS = int(os.environ.get("WORKERS", "2"))
"""One less than `make test` has: among these tests are those that race real deadlines."""

PYTEST_ARGS = shlex.split(os.environ.get("PYTEST_ARGS", ""))
MARKS = ("mark.thorough", "tests.tiers")
"""One of them stands in every file with thorough tests, unless all tests of its subject are."""
UNKNOWN_S = 30.0
"""So long the thorough tests of a file take of which no run was kept."""

SPARE = 1.2
"""Estimates are of a quiet machine whose processes end together; this much more is taken to pass."""

TIMEOUT_S = 240
"""Of a thorough test that names none itself: random histories in numbers take more than the minute of other tests."""

WITHOUT_TORCH = "torch-free"
CHAOS = ("--trials", "6", "--workers", "2", "--keep", "build/chaos", "--report", "build/reports/chaos-sample.json")


class Program(NamedTuple):
    """A part that is no set of tests. `near`: files of which a change has to reach one; `seconds`: about."""

    name: str
    command: tuple[str, ...]
    near: tuple[str, ...]
    seconds: float


PYTHON = sys.executable
PROGRAMS = (
    Program(
        WITHOUT_TORCH,
        ("make", "--no-print-directory", "test-torch-free"),
        ("pyproject.toml", "constraints.txt"),
        480.0,
    ),
    Program("sim", (PYTHON, "-m", "tests.simulation.run", "--seeds", "8000"), ("tests/simulation/run.py",), 225.0),
    Program("mutants", (PYTHON, "-m", "tests.mutants.run", "--count", "30"), ("tests/mutants/run.py",), 600.0),
    Program("chaos", (PYTHON, "-m", "tests.chaos.run", *CHAOS), ("tests/chaos/run.py",), 600.0),
)
PARTS = (*(subject.name for subject in tiers.SUBJECTS), *(program.name for program in PROGRAMS))


class Ended(NamedTuple):
    name: str
    code: int
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--touched-since", metavar="REVISION", help="'auto': what the last six hours have changed")
    parser.add_argument("--minutes", type=float, default=20.0, help="of what a change touches, at most (default 20)")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    began = time.monotonic()
    if options.touched_since:
        base = default_base() if options.touched_since == "auto" else options.touched_since
        ended, left_out = _touched(changed_since(base), options.minutes * 60)
        print(f"\nthe change since {base}")
    else:
        ended, left_out = _chosen(options.parts or PARTS), [part for part in PARTS if part not in options.parts]
        left_out = left_out if options.parts else []
    print(f"\n{'part':<34} {'took':>8}")
    for name, code, seconds in ended:
        print(f"{name:<34} {seconds / 60:>4.1f} min{'' if code == 0 else f'  FAILED ({code})'}")
    for part in left_out:
        print(f"left out: {part}")
    print(f"all: {(time.monotonic() - began) / 60:.1f} min", flush=True)
    return int(any(each.code for each in ended))


def _chosen(parts: Sequence[str]) -> list[Ended]:
    subjects = [subject.name for subject in tiers.SUBJECTS if subject.name in parts]
    ended = []
    if subjects:
        ended.append(_tests(tuple(_files()), " or ".join(subjects), " ".join(subjects)))
    return ended + [_run(each.name, each.command) for each in PROGRAMS if each.name in parts]


def _touched(changed: Sequence[str], limit_s: float) -> tuple[list[Ended], list[str]]:
    """The nearest to the change first, as far as they fit: the environment without torch where what it is made from
    changed, then test files, then programs."""
    far = reached(changed)
    programs = [each for each in PROGRAMS if far.keys() & set(each.near)]
    programs.sort(key=lambda each: each.name != WITHOUT_TORCH)
    files = {path: seconds / WORKERS * SPARE for path, seconds in _files().items() if path in far}
    nearest = sorted(files, key=lambda path: (far[path], files[path]))
    needs = {each.name: each.seconds for each in programs[:1] if each.name == WITHOUT_TORCH}
    needs |= {path: files[path] for path in nearest} | {each.name: each.seconds for each in programs}
    chosen, left_out, left_s = [], [], limit_s / times_slower()
    for name, seconds in needs.items():
        fits = seconds <= left_s
        (chosen if fits else left_out).append(name)
        left_s -= seconds if fits else 0.0
    chosen_files = [name for name in chosen if name in files]
    ended = [_tests(chosen_files, "", f"tests of {len(chosen_files)} files")] if chosen_files else []
    return ended + [_run(each.name, each.command) for each in programs if each.name in chosen], left_out


def _files() -> dict[str, float]:
    """Test files that have thorough tests, with the seconds that those take."""
    known = known_seconds().thorough
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    return {path: known.get(path, UNKNOWN_S) for path, text in sorted(texts.items()) if _is_thorough(path, text)}


def _is_thorough(path: str, text: str) -> bool:
    return tiers.subject_of(path) in tiers.THOROUGH_SUBJECTS or any(mark in text for mark in MARKS)


def _tests(files: Sequence[str], subjects: str, name: str) -> Ended:
    marks = f"thorough and ({subjects})" if subjects else "thorough"
    workers = ("-n", str(WORKERS), f"--timeout={TIMEOUT_S}")
    arguments = (*workers, "--dist", "loadgroup", "--no-loadscope-reorder", "--thorough", "-m", marks, *files)
    return _run(name, (sys.executable, "-m", "tests.run_suite", "thorough", *arguments, *PYTEST_ARGS))


def _run(name: str, command: Sequence[str]) -> Ended:
    print(f"\n--- {name}", flush=True)
    began = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return Ended(name, code, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
