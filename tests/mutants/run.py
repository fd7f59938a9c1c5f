"""Plants small mistakes in a copy of the tree, one at a time, and writes down which of them the nearest tests find.

python -m tests.mutants.run --count 150 --seed 1
"""

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Any

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.work_item import MutationSpec, WorkerOutcome, WorkResult

from tests.benchmarks.circumstances import end_when_told
from tests.mutants import sampling
from tests.mutants.operators import Operators
from tests.mutants.packages import LEFT_OUT, PACKAGES
from tests.mutants.sampling import Fate, Mutant, Mutation

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = Path(__file__).with_name("equivalent.toml")
NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "node_modules", "__pycache__")
COUNT_MAX, WORKERS_MAX = 5_000, 16
LIMIT_LEAST_S, LIMIT_TIMES = 60.0, 4.0
"""Tests that take so many times as long as without the mutant are taken to hang because of it."""
UNCHANGED_MOST_S = 300.0
JUDGED_FROM = 8
"""Of fewer mutants a package's share says little: one of two is half of them."""

COUNTED = ("tried", "killed", "equivalent_argued")

plugins.OPERATOR_PROVIDERS["people"] = Operators()


def main() -> int:
    options = _options()
    names = options.packages or list(PACKAGES)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    # Tests of the journal wait for the disk, which is no matter here.
    with tempfile.TemporaryDirectory(prefix="liver-mutants-", dir=memory) as folder:
        first = Path(folder, "0")
        shutil.copytree(ROOT, first, ignore=NOT_COPIED)
        limits = {name: _limit_s(name, first) for name in names}
        mutants = _drawn(names, options.count, options.seed)
        for number in range(1, options.workers):
            shutil.copytree(first, Path(folder, str(number)))
        results = _run_all(mutants, limits, [str(Path(folder, str(number))) for number in range(options.workers)])
    content = sampling.report(sorted(results, key=lambda item: mutants.index(item[0])))
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(content, indent=2) + "\n")
    return _summary(content)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="how many mutants, shared by the packages (default 150)")
    parser.add_argument("--seed", type=int, default=1, help="what draws the sample (default 1)")
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, metavar="NAME", help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--workers", type=int, default=2, choices=range(WORKERS_MAX + 1), metavar="N")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "mutants.json")
    options = parser.parse_args()
    options.workers = max(1, options.workers)
    if not 1 <= options.count <= COUNT_MAX:
        parser.error(f"--count must be from 1 to {COUNT_MAX}, is {options.count}")
    return options


def _drawn(names: list[str], count: int, seed: int) -> list[Mutant]:
    """The sample, package by package."""
    orders = {name: list(sampling.in_seeded_order(_mutations_of(name), seed)) for name in names}
    share = sampling.shares({name: len(order) for name, order in orders.items()}, count)
    carried_out = {name: (_carried_out(mutation) for mutation in orders[name]) for name in names}
    return [each for name in names for each in islice(filter(None, carried_out[name]), share[name])]


def _carried_out(mutation: Mutation) -> Mutant | None:
    """None for what is no program, such as a minus for the asterisk of `[*items]`, or a dotted name of an exception,
    which cosmic-ray cannot replace."""
    before = (ROOT / mutation.file).read_text()
    try:
        after = mutate_code(before, plugins.get_operator(mutation.operator)(), mutation.occurrence)
        if after is None:
            return None
        compile(after, mutation.file, "exec")
    except (AttributeError, SyntaxError):
        return None
    return Mutant(mutation, sampling.change_between(before, after))


def _mutations_of(package: str) -> list[Mutation]:
    """All that may alter what a function of these files decides."""
    sources = [ROOT / source for source in PACKAGES[package].sources]
    files = [file for path in sources for file in (path.glob("*.py") if path.is_dir() else (path,))]
    operators = {name: plugins.get_operator(name) for name in plugins.operator_names() if name not in LEFT_OUT}
    found = []
    for file in files:
        source = file.read_text()
        nodes = list(ast_nodes(get_ast(source)))
        for name, operator in operators.items():
            places = (start for node in nodes for start, _ in operator().mutation_positions(node))
            for occurrence, start in enumerate(places):
                function = sampling.function_of(start, source)
                if function is not None:
                    path = str(file.relative_to(ROOT))
                    found.append(Mutation(package, path, function, start, name, occurrence))
    return found


def _command(package: str, file: str) -> str:
    """What runs the tests of a package, those nearest to this file of it first."""
    chosen = ["-m", "not real and not thorough", "-x", "-q", "-p", "no:cacheprovider", "--basetemp=.tests"]
    places = [ROOT / test for test in PACKAGES[package].tests]
    files = [path for place in places for path in (place.rglob("test_*.py") if place.is_dir() else (place,))]
    tests = sampling.nearest_first(file, {str(path.relative_to(ROOT)): path.read_text() for path in files})
    return shlex.join([sys.executable, "-m", "pytest", *chosen, "--hypothesis-seed=0", *tests])


def _limit_s(package: str, copy: Path) -> float:
    """How long the tests may take with a mutant. Raises where they do not pass without one."""
    began, environment = time.monotonic(), {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        shlex.split(_command(package, PACKAGES[package].sources[0])),
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=UNCHANGED_MOST_S,
    )
    if done.returncode:
        sys.exit(f"the tests of {package} fail without any mutant:\n{done.stdout}")
    took_s = time.monotonic() - began
    print(f"{package}: tests pass in {took_s:.1f} s without a mutant", flush=True)
    return max(LIMIT_LEAST_S, LIMIT_TIMES * took_s)


def _run_all(mutants: list[Mutant], limits: dict[str, float], copies: list[str]) -> list[tuple[Mutant, Fate]]:
    arguments = tomllib.loads(ARGUMENTS.read_text()).get("mutant", [])
    context, results = multiprocessing.get_context("spawn"), []
    places = context.Queue()
    for copy in copies:
        places.put(copy)
    pool = ProcessPoolExecutor(len(copies), context, initializer=_enter, initargs=(places,))
    try:
        running = {pool.submit(_try, mutant.mutation, limits[mutant.mutation.package]): mutant for mutant in mutants}
        for future in as_completed(running):
            mutant, result = running[future], future.result()
            if result.worker_outcome is not WorkerOutcome.NORMAL:
                sys.exit(f"{mutant} could not be tried: {result.output}")
            argued = sampling.is_argued(mutant, arguments)
            fate = Fate.KILLED if result.is_killed else Fate.ARGUED if argued else Fate.SURVIVED
            results.append((mutant, fate))
            hung = " (tests ran out of time)" if result.output == "timeout" else ""
            wrong = " (ARGUED TO BE EQUIVALENT, WRONGLY)" if argued and result.is_killed else ""
            where = f"{mutant.mutation.file}:{mutant.mutation.start[0]} {mutant.mutation.function}"
            print(f"[{len(results)}/{len(mutants)}] {fate}{hung}{wrong}: {where}: {mutant.change}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _enter(places: Any) -> None:
    """Work in a copy of one's own."""
    os.chdir(places.get())
    os.environ["PYTHONPATH"] = os.getcwd()


def _try(mutation: Mutation, limit_s: float) -> WorkResult:
    end = (mutation.start[0] + 1, 0)  # Only has to come after the start: the occurrence says where.
    spec = MutationSpec(Path(mutation.file), mutation.operator, mutation.occurrence, mutation.start, end)
    return mutate_and_test([spec], _command(mutation.package, mutation.file), limit_s)


def _summary(content: dict[str, Any]) -> int:
    """Print what came of it; 1 where the tests of a package miss too many, or those of all packages together."""
    print(f"\n{'package':<14} {'tried':>6} {'killed':>7} {'argued':>7} {'of the rest':>12}")
    all_counts = content["packages"].values()
    low = (
        sampling.share_killed({key: sum(counts[key] for counts in all_counts) for key in COUNTED})
        < sampling.KILLED_LEAST
    )
    for name, counts in content["packages"].items():
        share = sampling.share_killed(counts)
        low = low or (counts["tried"] >= JUDGED_FROM and share < sampling.KILLED_LEAST)
        print(f"{name:<14} {counts['tried']:>6} {counts['killed']:>7} {counts['equivalent_argued']:>7} {share:>12.0%}")
    for survivor in content["survivors"]:
        print(f"survived: {survivor['file']}:{survivor['line']}: {survivor['change']}")
    return int(low)


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
