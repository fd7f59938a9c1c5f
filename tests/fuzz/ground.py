"""A real service process with an embedded PostgreSQL, and something in it that requests can find."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from tests.service.fake_agent import JOB, FakeAgent, step_row

START_S = 90.0
# The fuzzer asks as often as it can: budgets have a test of their own.
SETTINGS = {
    "LIVER_SERVICE_REQUESTS_PER_S": "1000000",
    "LIVER_SERVICE_AGENT_REQUESTS_PER_S": "1000000",
    "LIVER_SERVICE_SILENT_AFTER_S": "3600",
    "LIVER_SERVICE_GONE_AFTER_S": "3600",
}


@dataclass(frozen=True, slots=True)
class Ground:
    """A service that runs. `log` has what it wrote."""

    url: str
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]

    def headers(self, role: str | None) -> dict[str, str]:
        """What a caller of this role sends; none: nobody in particular."""
        if role is None:
            return {}
        return {"Authorization": f"Bearer {(self.folder / 'tokens' / f'{role}.token').read_text().strip()}"}

    def node(self, name: str) -> dict[str, str]:
        """What the agent of this node sends, which joins first."""
        with httpx.Client(base_url=self.url, timeout=30) as client:
            return FakeAgent(name, client, self.headers("join"), lambda: datetime.now(UTC)).headers

    def populate(self) -> str:
        """A job, its nodes, a step, a notice, a price. Returns the job's id."""
        with httpx.Client(base_url=self.url, headers=self.headers("operator"), timeout=30) as client:
            job_id = client.post("/api/v1/jobs", json=JOB).raise_for_status().json()["job_id"]
            client.put("/api/v1/pools/spot-a/price", json={"price_usd_per_hour": 1.5}).raise_for_status()

            def now() -> datetime:
                return datetime.now(UTC)

            agents = [FakeAgent(name, client, self.headers("join"), now) for name in ("a", "b")]
            for agent in agents:
                agent.sync()
            agents[0].sync(notices=(agents[0].notice(),), steps=(step_row(job_id, 1, 1, now(), loss=1.0),))
        return job_id


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    """Starts and ends a service. Not under /root: the embedded server does not run as root, and needs a path that
    others may enter."""
    folder = Path(tempfile.mkdtemp(prefix="liver-fuzz-"))
    folder.chmod(0o755)
    log = folder / "serve.log"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIVER_")}
    command = [sys.executable, "-m", "service.cli.main", "serve", "--port", "0", "--data-dir", str(folder)]
    with log.open("wb") as output:
        environment = inherited | SETTINGS | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        yield Ground(_url(process, log), folder, log, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at:
        if process.poll() is not None:
            raise RuntimeError(f"the service ended: {log.read_text()}")
        if found := re.search(r"service: (http://\S+)", log.read_text()):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{found[1]}/readyz", timeout=5).is_success:
                    return found[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    raise RuntimeError(f"the service did not start within {START_S:.0f} s: {log.read_text()}")
