"""Run many seeds: `python -m tests.simulation.run --seeds 10000 [--start S] [--bug NAME]`; exits 1 when one fails.

Each seed is one run of the handoff machines, and one of a target that follows sources which change while it reads.
`--replay SEED` runs one seed of the machines and prints what happened in it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from service.simulation.world.observer import Violation
from tests.simulation import streaming
from tests.simulation.bugs import BUGS, Bug
from tests.simulation.coverage import Pair, every_pair
from tests.simulation.impossible import IMPOSSIBLE
from tests.simulation.simulation import Simulation, run_seed

WORKERS_MAX = 2
SEEDS_PER_TASK = 100
FAILURES_SHOWN = 5
SEEDS_FOR_FULL_COVERAGE = 30_000


@dataclass(slots=True)
class Summary:
    """What many seeds gave, in numbers. `violations`: failures by which a rule was broken, and nothing was raised."""

    seeds: int = 0
    steps: int = 0
    events: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    boundaries: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    violations: int = 0

    def add(self, other: Summary) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.events += other.events
        self.endings += other.endings
        self.boundaries += other.boundaries
        self.pairs += other.pairs
        self.streams += other.streams
        self.failures += other.failures
        self.violations += other.violations


def run_seeds(start: int, count: int, bug: str | None = None) -> Summary:
    """Run `count` seeds; a failing one is counted, and the next is run."""
    summary = Summary()
    with (BUGS[bug] if bug is not None else Bug()).planted() as machines:
        for seed in range(start, start + count):
            summary.seeds += 1
            try:
                simulation = run_seed(seed, machines)
            except Violation as violation:
                summary.failures.append(str(violation))
                summary.violations += 1
                continue
            except Exception as error:  # A machine that raises is a failure like any other, and must name its seed.
                summary.failures.append(f"seed {seed}: {type(error).__name__}: {error}")
                continue
            summary.steps += simulation.truth.steps
            summary.events += simulation.clock.events
            summary.pairs += simulation.coverage.pairs
            summary.boundaries.update(simulation.truth.boundaries())
            summary.endings.update(f"{ended.stage} ({ended.decision})" for ended in simulation.truth.ended)
    return summary


def run_both(start: int, count: int, bug: str | None = None) -> Summary:
    """The machines, and, unless a bug is planted in them, streaming from the same seeds."""
    summary = run_seeds(start, count, bug)
    if bug is None:
        report = streaming.run_seeds(start, count)
        summary.streams += report.outcomes
        summary.failures += [f"streaming seed {seed}: {text}" for seed, text in report.failures]
    return summary


def run_in_parallel(start: int, count: int, bug: str | None, workers: int) -> Summary:
    """The same over a few processes."""
    tasks = [
        (first, min(SEEDS_PER_TASK, start + count - first), bug)
        for first in range(start, start + count, SEEDS_PER_TASK)
    ]
    summary = Summary()
    if workers == 1:
        for task in tasks:
            summary.add(run_both(*task))
        return summary
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for part in pool.starmap(run_both, tasks, chunksize=4):
            summary.add(part)
    return summary


def unmet_pairs(summary: Summary) -> list[Pair]:
    """Pairs that were neither met nor declared impossible."""
    return sorted(every_pair() - set(summary.pairs) - set(IMPOSSIBLE))


def wrongly_declared(summary: Summary) -> list[Pair]:
    """Pairs that are declared impossible, but were met."""
    return sorted(set(summary.pairs) & set(IMPOSSIBLE))


def print_summary(summary: Summary, seconds: float) -> None:
    pairs = every_pair()
    print(f"seeds      {summary.seeds} in {seconds:.1f} s ({summary.seeds / seconds:.0f} per second)")
    print(
        f"events     {summary.events} (about {summary.events // max(1, summary.seeds)} per seed), {summary.steps} steps"
    )
    for ending, count in sorted(summary.endings.items()):
        print(f"handoffs   {count:7d} {ending}")
    for boundary, count in sorted(summary.boundaries.items()):
        print(f"boundaries {count:7d} {boundary}")
    for outcome, count in sorted(summary.streams.items()):
        print(f"streams    {count:7d} {outcome.rstrip(',')}")
    met = len(set(summary.pairs) & pairs)
    print(f"coverage   {len(pairs)} (state, event) pairs: {met} met, {len(IMPOSSIBLE)} declared impossible")
    for pair in unmet_pairs(summary):
        print(f"           neither met nor declared impossible: {' / '.join(pair)}")
    for pair in wrongly_declared(summary):
        print(f"           declared impossible, but met: {' / '.join(pair)}")
    print(f"failures   {len(summary.failures)}")
    for failure in summary.failures[:FAILURES_SHOWN]:
        print(f"           {failure}")


def replay(seed: int, bug: str | None) -> int:
    """Print one run line by line."""
    with (BUGS[bug] if bug is not None else Bug()).planted() as machines:
        simulation = Simulation(seed, machines())
        simulation.notes = []
        try:
            simulation.run()
            ending = "at rest"
        except Violation as violation:
            ending = f"VIOLATION {violation}"
    for at_s, note in simulation.notes:
        print(f"{at_s:8.2f}  {note}")
    print(f"{simulation.clock.now:8.2f}  {ending}")
    return int(ending != "at rest")


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate handoffs, one run per seed.")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many seeds (default %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant a known bug; then failures are expected")
    parser.add_argument("--workers", type=int, choices=range(1, WORKERS_MAX + 1), default=WORKERS_MAX)
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print what happened")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return replay(arguments.replay, arguments.bug)
    started = time.monotonic()
    summary = run_in_parallel(arguments.start, arguments.seeds, arguments.bug, arguments.workers)
    print_summary(summary, time.monotonic() - started)
    if arguments.bug is not None:
        return int(not summary.failures)
    full = arguments.seeds >= SEEDS_FOR_FULL_COVERAGE
    return int(bool(summary.failures or wrongly_declared(summary) or (full and unmet_pairs(summary))))


if __name__ == "__main__":
    sys.exit(main())
