"""A suite fails for what failed once although it passes alone, keeps what tests took, and is held to its budget."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import run_suite, tiers
from tests.durations import RECORD, Kept, Taken, copy_of, merged, read_record

ROOT = Path(__file__).resolve().parent.parent
# One fails at first, beside others; those of one fixture have to run in one process, and each needs it in its order.
TESTS = """
import os
from pathlib import Path
import pytest

def test_first_time_only():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the machine was busy")

@pytest.fixture(scope="module", params=["a", "b"])
def job(request):
    return request.param, []

@pytest.mark.parametrize("step", range(6))
def test_steps(job, step):
    name, steps = job
    assert steps == list(range(step))
    steps.append(step)
"""


def test_what_fails_beside_others_fails_the_suite_although_it_passes_alone(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = thorough\naddopts = -p tests.durations\n")
    (tmp_path / "conftest.py").write_text(
        'def pytest_addoption(parser):\n    parser.addoption("--thorough", action="store_true")\n'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "tests.run_suite", "some", "test_it.py", "-n", "2", "--dist", "loadgroup"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
    assert "1 failed, 12 passed" in done.stdout, "tests of one job were not kept together"
    assert done.returncode == 1 and "FAILED, passed alone: test_it.py::test_first_time_only" in done.stdout
    record = read_record(tmp_path / RECORD)
    assert len(record) == 13 and len(record["test_it.py::test_first_time_only"].runs) == 1, "the run that passed"
    assert {kept.group for test, kept in record.items() if "[a-" in test} == {"test_it.py:job:job0"}
    assert json.loads((tmp_path / run_suite.SUITES).read_text())["some"]["cpu_s"] > 0


def test_above_its_budget_of_processor_seconds_a_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_suite.yardstick_s() > 0
    monkeypatch.setattr(run_suite, "yardstick_s", lambda: 0.5 * tiers.YARDSTICK_S)  # A faster machine has no less.
    began = time.time()
    run_suite.note("pure", run_suite.Took(60.0, tiers.CPU_MAX_S["pure"] - 1))
    assert run_suite.ended(["--began", str(began), "pure", "real"]) == 0
    assert "real       did not run" in capsys.readouterr().out
    run_suite.note("real", run_suite.Took(60.0, tiers.CPU_MAX_S["real"] + 1))
    assert run_suite.ended(["--began", str(began), "pure", "real"]) == 1
    assert "above its budget" in capsys.readouterr().out
    monkeypatch.setattr(run_suite, "yardstick_s", lambda: 1.1 * tiers.YARDSTICK_S)
    assert run_suite.ended(["--began", str(began), "pure", "real"]) == 0
    assert run_suite.ended(["--began", str(began - tiers.WALL_MAX_S), "pure"]) == 0
    assert f"{run_suite.RED}all, set-up included: 15.0 min of 15: too long" in capsys.readouterr().out


def test_of_a_test_the_last_runs_are_kept_and_a_clone_is_told_how_long_groups_take() -> None:
    def run(seconds: float, **changes: object) -> dict[str, Kept]:
        return {"tests/a.py::test[x]": Kept(True, "job", (Taken(seconds, 1.0, 0.5),))._replace(**changes)}

    record: dict[str, Kept] = {}
    for seconds in (90.0, 1.0, 2.0, 30.0, 31.0, 32.0):
        record = merged(record, run(seconds))
    assert [taken.seconds for taken in record["tests/a.py::test[x]"].runs] == [1.0, 2.0, 30.0, 31.0, 32.0]
    record |= {"tests/a.py::test[y]": Kept(False, "job", (Taken(5.0, 1.0, 0.5),))}
    assert copy_of(record) == ({"tests/a.py::test[x]": 30.0}, {"job": 35.0}, {"tests/a.py": 5.0})
