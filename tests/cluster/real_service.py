"""A service as a process of its own, with an embedded PostgreSQL in a folder that is gone afterwards."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

START_S, END_S = 90.0, 60.0


@dataclass(frozen=True, slots=True)
class RealService:
    """A service that runs. `log` has what it wrote."""

    url: str
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]

    def token(self, role: str) -> str:
        """The first token of this role."""
        return (self.folder / "tokens" / f"{role}.token").read_text().strip()


ServiceT = TypeVar("ServiceT", bound=RealService)


@contextlib.contextmanager
def service_folder() -> Iterator[Path]:
    """Not under /root: the embedded server does not run as root, and needs a path that others may enter."""
    folder = Path(tempfile.mkdtemp(prefix="liver-service-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def real_service(
    kind: type[ServiceT], folder: Path, arguments: Sequence[str], settings: Mapping[str, str]
) -> Iterator[ServiceT]:
    """Starts `python ARGUMENTS` and ends it. `settings`: LIVER_SERVICE_* by the rest of the name; without PORT it
    takes a free one."""
    log = folder / "serve.log"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LIVER_")}
    given = {f"LIVER_SERVICE_{name}": value for name, value in ({"PORT": "0"} | dict(settings)).items()}
    given |= {"LIVER_SERVICE_DATA_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=inherited | given)
    try:
        yield kind(_url(process, log), folder, log, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


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
