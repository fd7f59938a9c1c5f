"""Makes the folder that is carried to a machine with GPUs and no network: python -m tests.gpu.bundle [--to FOLDER]

That machine brings Python 3.12 on x86-64, torch with numpy, and nothing else. The folder has the tree, what it imports
as wheels under the tree's pins, NIXL without what is not used here, and `check.sh`, which unpacks them beside it once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
BYTES_MAX = 40_000_000
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PIP_LIMIT_S = 900
TREES = ("liver_core", "tests")
# What reads no network, no browser and no database.
NOT_CARRIED = (
    "tests/service",
    "tests/e2e",
    "tests/deploy",
    "tests/fuzz",
    "tests/migrations",
    "tests/docs",
    "tests/chaos",
)
PACKAGES = (
    "absl-py", "annotated-types", "einops", "iniconfig", "megatron-core", "nixl", "nixl-cu13", "packaging", "pluggy",
    "psutil", "pydantic", "pydantic_core", "Pygments", "pyroute2", "pytest", "pytest-timeout", "PyYAML",
    "typing-inspection", "typing_extensions",
)  # fmt: skip
SLIMMED = ("nixl_cu13", "nixl")
UNUSED = re.compile(
    r"(^|/)nixl_ep|(^|/)lib(aws|azure|s2n|curl|xml2|ucx_perftest)[^/]*$|\.scripts/|"
    r"libplugin_(OBJ|AZURE|AZURE_BLOB|GUSLI|GDS|GDS_MT|INFINIA|GPUNETIO|HF3FS|MOONCAKE)\.so"
)
"""Files of NIXL's wheel: plugins for stores and file systems and what they need, expert parallelism, tools."""

CHECK_SH = """#!/bin/sh
# Checks LiveR on the GPUs of this machine: sh check.sh [--parts job,certificate] [--report FILE]
# Needs Python 3.12 with torch and numpy. Writes gpu.json beside itself, again after each part.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [ ! -f "$here/packages/.complete" ]; then
    "$python" - "$here" <<'UNPACK'
import pathlib, shutil, sys, zipfile
here = pathlib.Path(sys.argv[1])
shutil.rmtree(here / "packages", ignore_errors=True)
for wheel in sorted((here / "wheels").glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(here / "packages")
(here / "packages" / ".complete").touch()
UNPACK
fi
cd "$here/tree"
export PYTHONPATH="$here/tree:$here/packages" PYTHONDONTWRITEBYTECODE=1
exec "$python" -m tests.gpu.check --report "$here/gpu.json" "$@"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 with a sentence on what stands in the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "gpu-bundle")
    target = parser.parse_args(arguments).to
    try:
        make(target)
    except BundleRefused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    print(f"{target}: {bytes_of(target) / 1e6:.1f} MB; there: sh {target.name}/check.sh")
    return 0


class BundleRefused(Exception):
    """Why there is no folder to carry. The text is for whoever asked for it."""


def make(target: Path) -> None:
    """Write the folder anew. What was there before stays until the new one is complete."""
    if target.exists() and not (target / "check.sh").is_file():
        raise BundleRefused(f"--to: {target} exists and is no bundle; name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "bundle"
        (made / "wheels").mkdir(parents=True)
        download(made / "wheels")
        for wheel in sorted((made / "wheels").glob("*.whl")):
            if wheel.name.split("-")[0] in SLIMMED:
                slim(wheel)
        for tree in TREES:
            copy_tree(tree, made / "tree")
        (made / "check.sh").write_text(CHECK_SH)
        if (size := bytes_of(made)) >= BYTES_MAX:
            raise BundleRefused(f"the folder would have {size / 1e6:.1f} MB, the limit is {BYTES_MAX / 1e6:.0f} MB")
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)


def download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    command += ["-c", str(ROOT / "constraints.txt"), *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BundleRefused(f"pip did not get the packages within {PIP_LIMIT_S} s") from None
    if done.returncode:
        raise BundleRefused(f"pip could not get the packages: {done.stderr.strip()[-800:]}")


def slim(wheel: Path) -> None:
    """Leave out what is not used, and pack the rest well."""
    beside = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as kept:
        for entry in whole.infolist():
            if not UNUSED.search(entry.filename):
                kept.writestr(entry, whole.read(entry), zipfile.ZIP_DEFLATED, 9)
    beside.replace(wheel)


def copy_tree(tree: str, target: Path) -> None:
    """Modules and what lies beside them; nothing that the tools make."""
    for path in sorted((ROOT / tree).rglob("*")):
        place = PurePosixPath(path.relative_to(ROOT).as_posix())
        if not path.is_file() or "__pycache__" in place.parts or str(place).startswith(NOT_CARRIED):
            continue
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / place)


def bytes_of(folder: Path) -> int:
    return sum(os.stat(path).st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
