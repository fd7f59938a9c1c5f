"""Ctrl-C during a real demo ends every process of it, and keeps the logs of what was cut off."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.agent.waiting import eventually

pytestmark = [pytest.mark.real, pytest.mark.thorough, pytest.mark.timeout(200)]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored, which every child inherits but for this."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_no_process_and_says_where_the_logs_are(tmp_path: Path):
    # The embedded server runs as another user and must be able to enter; every process of the demo inherits the name.
    tmp_path.chmod(0o755)
    environment = {**os.environ, "DEMO_OF": str(tmp_path)}
    output = tmp_path / "output"
    with output.open("w") as file:
        demo = subprocess.Popen(
            [sys.executable, "-m", "service.cli.main", "demo", "--plain"],
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    asyncio.run(eventually(lambda: "service at" in output.read_text(), "the start of the service", 90.0))
    asyncio.run(eventually(lambda: len(_processes(f"DEMO_OF={tmp_path}")) > 4, "the start of nodes", 60.0))
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130
    assert _processes(f"DEMO_OF={tmp_path}") == []
    said = output.read_text()
    kept = re.search(r"^kept: (\S+)", said, re.MULTILINE)
    assert "interrupted" in said and kept is not None
    assert (Path(kept[1]) / "logs" / "service.log").is_file()
    shutil.rmtree(kept[1])


def _processes(entry: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if entry.encode() in content.split(b"\0"):
            found.append(int(path.parent.name))
    return found
