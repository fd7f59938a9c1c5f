"""`make gpu-check` rehearsed on the CPU as people run it: every part does what it says, and says so. Service and agents
are left to the other tests, which run them on a CPU all the time, and to the rehearsal of the folder.

Nothing here says anything of a GPU, and the report says that itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.check import PARTS, PATIENCE, TOTAL_S, Verdict

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = TOTAL_S * PATIENCE["cpu"]
"""Of the run itself. It took four minutes on two cores with a load of 17."""

pytestmark = [pytest.mark.real, pytest.mark.timeout(LIMIT_S + 60)]


def test_every_part_of_the_check_passes_on_a_cpu_and_is_labelled_a_rehearsal(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    parts = [part.name for part in PARTS if part.name != "product"]
    command = [sys.executable, "-m", "tests.gpu.check", "--device", "cpu", "--report", str(report)]
    command += ["--parts", ",".join(parts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S + 30, check=False)
    found = json.loads(report.read_text())
    verdicts = {name: (part["verdict"], part["reason"]) for name, part in found["parts"].items()}
    assert {name: said for name, said in verdicts.items() if said[0] != Verdict.PASSED} == {}
    assert list(verdicts) == parts
    assert done.returncode == 0, done.stdout[-2_000:]
    assert (found["device"], found["label"]) == ("cpu", "rehearsal on a CPU: says nothing of a GPU")
    assert all(part["seconds"] > 0 and part["reason"] for part in found["parts"].values())
