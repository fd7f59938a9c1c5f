"""How long each test takes, kept from run to run, and the order of tests that follows from it.

Every run adds to build/reports/durations.json: seconds of set-up and in all, and processor seconds of the test's
process and of all that descend from it. Processes that share a suite get the longest first, so that they end together;
tests that share a fixture of their module stay together, all others are spread one by one. A clean clone has no
build/, so a copy in seconds lies in tests/durations.json: `make durations` writes it anew.
"""

import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from _pytest.nodeid import NodeId

from tests import tiers

RECORD = Path("build/reports/durations.json")
COPY = Path(__file__).with_suffix(".json")
# Of each test the last runs are kept, and their median counts: one run beside a busy neighbour says little.
RUNS_KEPT = 5
# What is not on record takes this long; the copy leaves out what takes less.
UNKNOWN_S = 0.5


class Taken(NamedTuple):
    """What one run of one test took, in seconds; `cpu_s` over all processes that descend from the test's."""

    seconds: float
    cpu_s: float
    setup_s: float


class Kept(NamedTuple):
    """The last runs of a test, whether `make test` runs it, and the tests that it was scheduled with."""

    in_make_test: bool
    group: str
    runs: tuple[Taken, ...]

    @property
    def seconds(self) -> float:
        return median(run.seconds for run in self.runs)


Record = dict[str, Kept]
"""By node id, without the group that xdist puts behind it."""


def read_record(path: Path = RECORD) -> Record:
    """Nothing where no run was kept, or the file is not one of these."""
    try:
        found = json.loads(path.read_text())["tests"].items()
        return {
            test: Kept(in_test, group, tuple(Taken(*run) for run in runs)) for test, (in_test, group, runs) in found
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def merged(record: Record, new: Record) -> Record:
    """The record with one more run."""
    runs = {test: ((*record[test].runs,) if test in record else ()) + kept.runs for test, kept in new.items()}
    return record | {test: kept._replace(runs=runs[test][-RUNS_KEPT:]) for test, kept in new.items()}


def write_record(record: Record, path: Path = RECORD) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(test)}: {json.dumps(record[test])}" for test in sorted(record))
    written = path.with_suffix(".new")
    written.write_text(f'{{"fields": {json.dumps(Taken._fields)}, "tests": {{\n{lines}\n}}}}\n')
    written.replace(path)


def parted(node_id: str) -> tuple[str, str]:
    """A test's own id and the group behind it, which is empty where the test is scheduled by itself."""
    test, at, group = node_id.rpartition("@")
    return (test, group) if at and "]" not in group else (node_id, "")


def seconds_by_group(record: Record) -> dict[str, float]:
    """Of each group, and of each test that is in none."""
    found: dict[str, float] = defaultdict(float)
    for test, kept in record.items():
        found[kept.group or test] += kept.seconds
    return dict(found)


def too_long(record: Record) -> dict[str, float]:
    """Cases of `make test` that take longer than any may, in seconds."""
    return {
        test: kept.seconds for test, kept in record.items() if kept.in_make_test and kept.seconds > tiers.CASE_MAX_S
    }


class Copy(NamedTuple):
    """What a clean clone has to know, in seconds. `thorough`: of the thorough tests of each file together."""

    too_long: dict[str, float]
    groups: dict[str, float]
    thorough: dict[str, float]


def copy_of(record: Record) -> Copy:
    thorough: dict[str, float] = defaultdict(float)
    for test, kept in record.items():
        if not kept.in_make_test:
            thorough[test.partition("::")[0]] += kept.seconds
    groups = {group: seconds for group, seconds in seconds_by_group(record).items() if seconds >= UNKNOWN_S}
    return Copy(
        *({name: round(all_s[name], 1) for name in sorted(all_s)} for all_s in (too_long(record), groups, thorough))
    )


def known_seconds() -> Copy:
    """As the runs here took, else as the copy in the tree says."""
    try:
        copied = Copy(**json.loads(COPY.read_text()))
    except (OSError, ValueError, TypeError):
        copied = Copy({}, {}, {})
    here = copy_of(read_record())
    return Copy(here.too_long or copied.too_long, copied.groups | here.groups, copied.thorough | here.thorough)


class Durations:
    """Plugin of the process that hears of every test: it keeps what the tests of this run took."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._setup_s: dict[str, float] = {}
        self._not_passed: set[str] = set()
        self._record: Record = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test, group = parted(report.nodeid)
        self._seconds[test] += report.duration
        if report.when == "setup":
            self._setup_s[test] = report.duration
        if not report.passed:
            self._not_passed.add(test)  # How long that took says nothing of the next run.
        if report.when == "teardown" and test not in self._not_passed:
            cpu_s = sum(value for name, value in report.user_properties if name == "cpu_s" and isinstance(value, float))
            seconds = (self._seconds[test], cpu_s, self._setup_s.get(test, 0.0))
            taken = Taken(*(round(value, 2) for value in seconds))
            self._record[test] = Kept("thorough" not in report.keywords, group, (taken,))

    def pytest_sessionfinish(self) -> None:
        if self._record:
            write_record(merged(read_record(self._path), self._record), self._path)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.rootpath / RECORD), "durations")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_BEGAN_CPU_S] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "teardown":
        # Less than none: something has ended that nobody here waits for.
        report.user_properties.append(("cpu_s", max(0.0, _cpu_s() - item.stash[_BEGAN_CPU_S])))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, Any, Any]:
    """Groups first and the order last: in between, tests are left out."""
    if not hasattr(config, "workerinput"):
        return (yield)
    for item, group in zip(items, groups_of(items), strict=True):
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    found = yield
    for item in items:
        _put_group_into_the_id(item)
    seconds = known_seconds().groups
    units = {item: (group or test) for item in items for test, group in [parted(item.nodeid)]}
    items.sort(key=lambda item: (-seconds.get(units[item], UNKNOWN_S), units[item]))
    return found


def groups_of(items: list[pytest.Item]) -> list[str]:
    """For each test the group that shares fixtures of a module with it; an empty name where it shares none.

    A fixture that has parameters is another one for each of them.
    """
    shared = [_shared_fixtures(item) for item in items]
    groups: dict[str, str] = {}
    for fixtures in shared:
        joined = fixtures | {groups[fixture] for fixture in fixtures & groups.keys()}
        groups |= {fixture: min(joined) for fixture in fixtures}
        groups |= {fixture: min(joined) for fixture, group in groups.items() if group in joined}
    return [groups[min(fixtures)] if fixtures else "" for fixtures in shared]


def main() -> int:
    """Write the copy anew, from what the runs here have taken."""
    record = read_record()
    if not record:
        print(f"error: {RECORD} has no runs; run make test first", file=sys.stderr)
        return 1
    COPY.write_text(json.dumps(copy_of(record)._asdict(), indent=1) + "\n")
    return 0


_BEGAN_CPU_S = pytest.StashKey[float]()


def _shared_fixtures(item: pytest.Item) -> set[str]:
    """Fixtures of a test that other tests of its module use too, each with the parameters that it depends on."""
    info: Any = getattr(item, "_fixtureinfo", None)
    if info is None:
        return set()
    defined = {name: found[-1] for name, found in info.name2fixturedefs.items() if found[-1].baseid}
    callspec: Any = getattr(item, "callspec", None)
    indices = callspec.indices if callspec else {}
    wide = [
        f"{name}{index}" for name, index in sorted(indices.items()) if name in defined and _is_shared(defined[name])
    ]
    path = item.nodeid.partition("::")[0]
    return {":".join((path, name, *wide)) for name, fixture in defined.items() if _is_shared(fixture)}


def _put_group_into_the_id(item: Any) -> None:
    """xdist 3.8 does so in a way that pytest 9.2 does not see, and then takes every test for one of no group."""
    marker = item.get_closest_marker("xdist_group")
    if marker is not None and not parted(item.nodeid)[1]:
        item._id = NodeId.parse(f"{item.nodeid}@{marker.args[0]}")


def _is_shared(fixture: Any) -> bool:
    return fixture.scope in ("class", "module", "package")


def _cpu_s() -> float:
    """Of this process, of all that descend from it, and of those among them that have ended and were waited for."""
    total, processes = 0.0, [os.getpid()]
    while processes:
        process = processes.pop()
        with contextlib.suppress(OSError):  # It has just ended: whoever waits for it counts it from now on.
            # The fields behind the name, from the third on: user, system, and both of children waited for.
            numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
            total += sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")
            for thread in os.scandir(f"/proc/{process}/task"):
                with open(f"{thread.path}/children") as children:
                    processes += map(int, children.read().split())
    return total


if __name__ == "__main__":
    sys.exit(main())
