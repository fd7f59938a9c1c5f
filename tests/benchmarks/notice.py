"""Measures what a notice costs: steps lost, and the time until it is answered and until the node may go.

Run from the root of the tree: python -m tests.benchmarks.notice [--runs N] [--job fast|slow] [--for-s SECONDS]
[--fresh] [--keep] [--report FILE].
A run's record is written at once, and a later call with the same tree goes on where this one ended. A run that cannot
be carried through is in the report with its reason, and the status is then 1; a missed target leaves the status alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx

from deploy.local.processes import DemoFailed, Processes
from tests.benchmarks.circumstances import circumstances, end_when_told
from tests.benchmarks.notice_cases import FAST, SLOW, Case, cases
from tests.benchmarks.notice_cluster import NoticeCluster
from tests.benchmarks.notice_report import lines, report

RUNS = 100
TRIES = 2
"""A case that could not be carried through is tried again on a new cluster, so often in all."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. `until`: moment of `time.monotonic` after which no run is begun."""

    runs: int
    jobs: tuple[str, ...]
    until: float
    report: Path
    fresh: bool
    keep: bool

    @property
    def records(self) -> Path:
        """One line a run."""
        return self.report.with_name(f"{self.report.stem}-runs.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what is left to play, write the report and print it."""
    options = parse(arguments)
    where = circumstances("tests.benchmarks.notice")
    wanted = cases(options.runs)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    known = {} if options.fresh else resumed(options.records, wanted, where["commit"])
    options.records.write_text("".join(json.dumps(record) + "\n" for record in known.values()))
    if known:
        print(f"{len(known)} of {len(wanted)} runs are known: {options.records}", flush=True)
    left = [case for case in wanted if case.number not in known and case.job in options.jobs]
    for _, pending in groupby(left, key=lambda case: case.job):
        play(list(pending), options, known, where["commit"])
    found = write_report(options.report, known, where)
    print("\n".join(lines(found)))
    print(f"{options.report}: {found['runs']} runs of {len(wanted)}")
    return 1 if found["failed"] else 0


def parse(arguments: Sequence[str] | None) -> Options:
    """Options of a command line. Exits where one of them means nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--job", choices=(FAST, SLOW), default=None, help="only the runs of this job")
    parser.add_argument("--for-s", type=float, default=None, help="begin no run after so many seconds")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are known")
    parser.add_argument("--keep", action="store_true", help="keep the folders with the logs of every process")
    parser.add_argument("--report", type=Path, default=Path("build/reports/notice.json"))
    given = parser.parse_args(arguments)
    if given.runs < 1:
        parser.error(f"--runs: {given.runs} is less than 1")
    if given.for_s is not None and given.for_s <= 0:
        parser.error(f"--for-s: {given.for_s:g} is not more than 0")
    until = float("inf") if given.for_s is None else time.monotonic() + given.for_s
    jobs = (FAST, SLOW) if given.job is None else (given.job,)
    return Options(given.runs, jobs, until, given.report, given.fresh, given.keep)


def resumed(path: Path, wanted: Sequence[Case], commit: str | None) -> dict[int, dict[str, Any]]:
    """The runs that an earlier call has done: of these cases, by this tree. One that failed is tried again."""
    lines_of = path.read_text().splitlines() if path.exists() else []
    known: dict[int, dict[str, Any]] = {}
    for line in lines_of:
        with suppress(ValueError):  # The last line of a call that was killed may be torn.
            record = json.loads(line)
            case = next((case for case in wanted if case.number == record["number"]), None)
            same = case is not None and all(record[name] == value for name, value in case.as_json().items())
            if same and record["commit"] == commit and "failed" not in record:
                known[record["number"]] = record
    return known


def play(pending: list[Case], options: Options, known: dict[int, dict[str, Any]], commit: str | None) -> None:
    """Play cases of one job. A run that fails ends its cluster; the next one begins on another."""
    tries = 0
    while pending and time.monotonic() < options.until:
        folder = Path(tempfile.mkdtemp(prefix="liver-bench-notice-"))
        # The embedded PostgreSQL does not run as root: it must be able to enter the folder.
        folder.chmod(0o755)
        processes = Processes(folder / "logs")
        cluster = NoticeCluster(folder, processes, pending[0].job, tuple(pending))
        text = ""
        try:
            cluster.start()
            while pending and time.monotonic() < options.until:
                record = cluster.play(pending[0], tuple(pending[1:]))
                note(record, options.records, known, commit)
                tries = 0
                pending.pop(0)
        except (DemoFailed, httpx.HTTPError) as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            cluster.close()
            processes.close()
            if options.keep or text:
                print(f"logs: {folder / 'logs'}", flush=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        if text:
            tries += 1
            print(f"run {pending[0].number}, try {tries}: {text}", flush=True)
        if tries == TRIES:
            note({**pending.pop(0).as_json(), "failed": text}, options.records, known, commit)
            tries = 0


def note(record: dict[str, Any], path: Path, known: dict[int, dict[str, Any]], commit: str | None) -> None:
    """Keep one record, on disk before anything else happens."""
    known[record["number"]] = record = {**record, "commit": commit}
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if "failed" in record:
        return
    safe = record["notice_to_safe_s"]
    print(
        f"run {record['number']}: {record['job']} {record['provider']} notice {record['notice_s']} s, gone after "
        f"{record['goes_after_s']:g} s: {record['rung']}, safe {'never' if safe is None else f'{safe:.2f} s'}, "
        f"{record['lost_steps']} steps lost, decided {_ms(record['heard_to_decided_s'])}, "
        f"first order {_ms(record['heard_to_first_order_s'])}, load {record['load_average']:.1f}",
        flush=True,
    )


def write_report(path: Path, known: dict[int, dict[str, Any]], where: dict[str, Any]) -> dict[str, Any]:
    """Everything that is known, in the order of the runs."""
    records = [known[number] for number in sorted(known)]
    done = [record for record in records if "failed" not in record]
    failed = [record for record in records if "failed" in record]
    found = {
        **report(done),
        "failed": failed,
        **where,
        "load_average_at_end": [round(each, 2) for each in os.getloadavg()],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _ms(value: float | None) -> str:
    return "?" if value is None else f"{value * 1000:.0f} ms"


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
