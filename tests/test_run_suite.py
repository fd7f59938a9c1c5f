"""A suite fails for what fails alone too, names what is unsteady, and runs nothing again where much fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNSTEADY = """
from pathlib import Path
def test_first_time_only():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the machine was busy")
"""


def _run(tmp_path: Path, source: str) -> tuple[int, str]:
    (tmp_path / "test_it.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "tests.run_suite", "some", "test_it.py", "-n", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout


def test_a_test_that_passes_alone_passes_the_suite_and_is_named(tmp_path: Path) -> None:
    code, printed = _run(tmp_path, UNSTEADY)
    assert code == 0 and "UNSTEADY" in printed
    report = json.loads((tmp_path / "build/reports/unsteady-some.json").read_text())
    assert report == {"suite": "some", "unsteady": ["test_it.py::test_first_time_only"]}


def test_a_test_that_fails_alone_too_fails_the_suite(tmp_path: Path) -> None:
    code, printed = _run(tmp_path, UNSTEADY + "def test_wrong():\n    assert 1 == 2\n")
    assert code == 1 and "FAILED, also alone:\n  test_it.py::test_wrong" in printed


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    code, printed = _run(tmp_path, "".join(f"def test_{n}():\n    assert False\n" for n in range(7)))
    assert code == 1 and "none is run again" in printed


def test_an_error_of_collection_fails_the_suite(tmp_path: Path) -> None:
    assert _run(tmp_path, "import nothing_of_that_name\n")[0] == 2
