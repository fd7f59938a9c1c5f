"""The folder for a GPU machine, made and run as there: in a Python 3.12 of its own that has torch and numpy only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gpu import bundle
from tests.gpu.check import Verdict

PARTS = "machine,job,certificate,product"
"""What a fresh environment could lack is imported by these."""
INSTALL_S, RUN_S = 900.0, 900.0

pytestmark = [pytest.mark.real, pytest.mark.thorough, pytest.mark.timeout(INSTALL_S + RUN_S + bundle.PIP_LIMIT_S)]


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Of a new environment. Skips where there is no Python 3.12 or no torch for it."""
    found = shutil.which(f"python{bundle.PYTHON}")
    if found is None or subprocess.run([found, "-c", "import venv"], check=False).returncode:
        pytest.skip(f"the folder is for Python {bundle.PYTHON}, and this machine has no python{bundle.PYTHON}")
    subprocess.run([found, "-m", "venv", str(tmp_path / "environment")], check=True, timeout=120)
    made = str(tmp_path / "environment" / "bin" / "python")
    installed = subprocess.run(
        [made, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "torch", "numpy"],
        capture_output=True, text=True, timeout=INSTALL_S, check=False,
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"no torch for Python {bundle.PYTHON}: {installed.stderr.strip()[-400:]}")
    return made


def test_the_folder_runs_in_a_fresh_environment_that_has_torch_and_numpy_only(tmp_path: Path, python: str) -> None:
    folder = tmp_path / "bundle"
    bundle.make(folder)
    assert bundle.bytes_of(folder) < bundle.BYTES_MAX
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = ["sh", str(folder / "check.sh"), "--device", "cpu", "--parts", PARTS]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=outside | {"PYTHON": python},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    found = json.loads((folder / "gpu.json").read_text())["parts"]
    assert {name: part["verdict"] for name, part in found.items()} == dict.fromkeys(PARTS.split(","), Verdict.PASSED)
    assert done.returncode == 0, done.stdout[-2_000:]
