"""Where and with what a benchmark ran: hardware, versions, command, load."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def end_when_told() -> None:
    """SIGTERM ends this process as Ctrl-C does, so that what it has started is ended. A process forked from it that has
    not its own way yet just ends: what was started is not its own."""
    own = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() != own:
            os._exit(128 + signal.SIGTERM)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def circumstances(module: str) -> dict[str, Any]:
    """What is put into the report of `module`."""
    names = ("torch", "megatron-core", "nixl", "numpy")
    found = hardware(module)
    found["versions"] |= {name: version(name) for name in names}
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return found | {"tcp_congestion_control": congestion}


def hardware(module: str) -> dict[str, Any]:
    """The same without what only training needs."""
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "hardware": {
            "cpu": model[0] if model else platform.machine(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
        },
        "versions": {"python": platform.python_version()},
        "commit": commit.stdout.strip() or None,
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average_at_start": [round(each, 2) for each in os.getloadavg()],
    }
