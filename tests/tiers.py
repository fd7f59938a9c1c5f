"""What `make test` runs and what it leaves to `make test-thorough`, and how much either may cost.

A test belongs to `make test` unless it, or a parameter of it, is marked `thorough`. Its subject follows from its folder
and its cost from its marks. All limits of the two commands stand here and nowhere else.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest

WALL_MAX_S = 15 * 60.0
"""Of `make test`, from a bare clone on two cores. Above it the last line is red."""

CPU_MAX_S = {"pure": 330.0, "service": 650.0, "real": 1_050.0}
"""Processor seconds of each suite of `make test`, of all processes that it starts. Above them it fails: wall time
depends on the neighbours, processor time less. A third more than a bare clone took on a machine whose neighbours were
busy, where the same tests take half as much again."""

YARDSTICK_S = 0.32
"""Processor seconds of `run_suite.yardstick_s` that these budgets go with. Where it takes longer, so do the suites,
and budgets grow alike. It is derived: two cores of an AMD EPYC took 0.54 s for it, and for the suites 1.3 to 1.7 times
as much as the machine of the budgets; this is 0.54 by 1.7."""

CASE_MAX_S = 20.0
"""A case of `make test` that is on record with more has to be named below."""

MAY_TAKE_LONGER = {
    "tests/e2e/test_real_ranks.py::test_a_notice_for_a_node_with_a_real_rank_is_watched_to_its_commit": (
        "the whole product once: service, agents, ranks and a browser"
    ),
    "tests/e2e/test_console.py::test_every_screen_shows_its_data_and_everybody_can_read_it[light]": (
        "the one pass over every screen"
    ),
    "tests/liver_core/rank/prepare/test_host_memory.py::"
    "test_a_device_with_room_for_one_tile_is_handed_over_live_bit_for_bit[bf16-None]": (
        "the smallest budget, where state passes through host memory tile by tile"
    ),
}
LONGER_MOST = 10

UNSTEADY: dict[str, str] = {}
"""Tests that may fail beside others and pass alone: "owner: reason". Any other test that does fails the run."""


class Subject(NamedTuple):
    """Tests of some folders."""

    name: str
    folders: tuple[str, ...]


SUBJECTS = (
    Subject("rank", ("tests/liver_core/rank", "tests/liver_core/device")),
    Subject("core", ("tests/liver_core", "tests/simulation", "tests/scenarios")),
    Subject("agent", ("tests/agent",)),
    Subject("service", ("tests/service", "tests/migrations", "tests/fuzz")),
    Subject("console", ("tests/e2e",)),
    Subject("whole", ("tests/deploy", "tests/docs")),
    Subject("tools", ("tests/benchmarks", "tests/chaos", "tests/gpu", "tests/mutants", "tests/recipes")),
    Subject("tree", ("tests",)),
)
"""The first that has a test's folder is its subject, and a mark of that name is put on it."""

THOROUGH_SUBJECTS = frozenset({"tools"})
"""None of their tests is run by `make test`: they test what tests and measures the product."""


def subject_of(path: str) -> str:
    """The subject of a test file, by its path in the tree."""
    parents = {str(parent) for parent in PurePosixPath(path).parents}
    return next(subject.name for subject in SUBJECTS if parents & set(subject.folders))


def sample(values: Iterable[Any], *of_make_test: Any) -> list[Any]:
    """Parameters of a test: `make test` runs those that are named, `make test-thorough` all others.

    A value may be a tuple of several parameters, as for `pytest.mark.parametrize`.
    """
    listed = list(values)
    unknown = [value for value in of_make_test if value not in listed]
    assert not unknown, f"{unknown} are not among {listed}"
    return [value if value in of_make_test else pytest.param(*_several(value), marks=THOROUGH) for value in listed]


THOROUGH = pytest.mark.thorough


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)
