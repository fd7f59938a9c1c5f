"""The example for benchmarks outside: LiveR's policy on 0/1 availability, a price and a deadline."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from service.policy.plain_policies import UniformProgressPolicy

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "tick_by_tick.py"
HOUR_S, TICK_S = 3_600.0, 600.0


def example():
    spec = importlib.util.spec_from_file_location("tick_by_tick", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


EXAMPLE_MODULE = example()


def task(*, work_h: float = 10, deadline_h: float = 14):
    return EXAMPLE_MODULE.Task(work_h * HOUR_S, deadline_h * HOUR_S, 12.0, TICK_S)


@given(st.lists(st.booleans(), min_size=84, max_size=84))
def test_whatever_spot_does_the_deadline_is_kept_at_no_more_than_on_demand_alone_and_its_restarts(available):
    played = EXAMPLE_MODULE.play([(there, 4.0) for there in available], task())
    assert played.missing_s == 0
    changes = 1 + sum(a != b for a, b in zip(played.choices, played.choices[1:], strict=False))
    assert played.usd <= 12.0 * (10 + changes * 300 / HOUR_S) + 1e-6


def test_spot_that_stays_is_all_that_is_bought():
    played = EXAMPLE_MODULE.play([(True, 4.0)] * 84, task())
    assert set(played.choices) == {"spot"}
    assert abs(played.usd - 4.0 * (10 + 300 / HOUR_S)) < 1e-6


def test_other_policies_go_behind_the_same_page():
    played = EXAMPLE_MODULE.play([(tick % 30 < 20, 4.0) for tick in range(84)], task(), UniformProgressPolicy())
    assert played.missing_s == 0


def test_it_runs_as_a_command():
    trace = "".join(f"{int(tick % 30 < 20)},4.0\n" for tick in range(84))
    command = [sys.executable, str(EXAMPLE), "--work-h", "10", "--deadline-h", "14", "--on-demand", "12"]
    root = str(EXAMPLE.parents[2])
    done = subprocess.run(
        command, input=trace, capture_output=True, text=True, timeout=60, check=True, env={"PYTHONPATH": root}
    )
    assert "0.00 h of work missing at the deadline" in done.stdout
