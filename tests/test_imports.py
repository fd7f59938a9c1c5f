"""What may be imported where torch is not installed, shown by importing it in a fresh interpreter."""

import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "megatron", "nixl", "numpy")
PURE = (
    "liver_core",
    "liver_core.layout",
    "liver_core.reshard",
    "liver_core.memory",
    "liver_core.handoff",
    "agent.protocol",
)

IMPORT_AND_TELL = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print(",".join(sorted(name for name in sys.argv[2].split(",") if name in sys.modules)))
"""


def test_importing_the_pure_half_and_the_wire_contract_loads_nothing_heavy():
    assert heavy_modules_after_importing(PURE) == ""


def test_importing_every_module_of_the_service_loads_nothing_heavy():
    pytest.importorskip("sqlalchemy")
    assert heavy_modules_after_importing(modules_of("service")) == ""


def heavy_modules_after_importing(names: tuple[str, ...]) -> str:
    """Comma-separated heavy modules that a fresh interpreter has loaded after importing all of `names`."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_TELL, ",".join(names), ",".join(HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules_of(package: str) -> tuple[str, ...]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is not a package"
    found = pkgutil.walk_packages(list(spec.submodule_search_locations), prefix=f"{package}.")
    return (package, *(module.name for module in found if not module.name.endswith("__main__")))
