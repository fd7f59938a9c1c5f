"""Trials side by side: each in a process of its own, since a trial moves its process into a network namespace."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.chaos.report import load

COMMAND = (sys.executable, "-m", "tests.chaos.run")


def play_side_by_side(
    seeds: Iterable[int],
    workers: int,
    *,
    command: tuple[str, ...] = COMMAND,
    say: Callable[[str], None],
    done: Callable[[int, dict[str, Any]], None],
) -> list[int]:
    """Play `seeds`, `workers` at a time, and call `done` with seed and record of each, one call at a time.

    Each is `command` with `--trials 1 --seed N --report FILE`. Returns the seeds whose process left no record. When
    interrupted it tells the trials under way to end, and waits for them."""
    waiting = iter(seeds)
    running: dict[int, subprocess.Popen[str]] = {}
    lock = threading.Lock()
    stopped = threading.Event()
    failed: list[int] = []

    def work() -> None:
        while True:
            with lock:
                seed = None if stopped.is_set() else next(waiting, None)
                if seed is None:
                    return
                folder = tempfile.TemporaryDirectory(prefix="liver-chaos-report-")
                report = Path(folder.name) / "report.json"
                process = running[seed] = _start(command, seed, report)
            with folder:
                assert process.stdout is not None
                for line in process.stdout:
                    # Of its own summary of one trial nothing is said: all trials get one at the end.
                    if line.startswith(("seed ", "    ")):
                        say(line.rstrip() if line.startswith("seed ") else f"seed {seed}: {line.strip()}")
                process.wait()
                record = load(report).get(seed)
            with lock:
                del running[seed]
                if record is not None:
                    done(seed, record)
                elif not stopped.is_set():
                    failed.append(seed)
                    say(f"seed {seed}: no record, exit status {process.returncode}")

    # Not threads that are joined here: an interrupted join takes a thread that still runs for one that has ended.
    with ThreadPoolExecutor(workers) as pool:
        at_work = [pool.submit(work) for _ in range(workers)]
        try:
            for each in at_work:
                each.result()
        except BaseException:
            with lock:
                stopped.set()
                for process in running.values():
                    process.terminate()
            raise
    return sorted(failed)


def _start(command: tuple[str, ...], seed: int, report: Path) -> subprocess.Popen[str]:
    words = [*command, "--trials", "1", "--seed", str(seed), "--report", str(report)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
