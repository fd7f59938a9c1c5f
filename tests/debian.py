"""Programs of Debian packages that tests run: installed where that can be done here, else the test is skipped."""

import os
import shutil
import subprocess

import pytest

INSTALL_S = 240


def needs(program: str, package: str) -> str:
    """The program's path. Skips the test, naming the package, where it is missing and cannot be installed."""
    found = shutil.which(program)
    if found is None and os.getuid() == 0 and shutil.which("apt-get") is not None:
        install = [
            "apt-get",
            "-qq",
            "-o",
            "DPkg::Lock::Timeout=120",
            "install",
            "-y",
            "--no-install-recommends",
            package,
        ]
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "-qq", "update"], install):
            subprocess.run(command, env=quiet, capture_output=True, timeout=INSTALL_S, check=False)
        found = shutil.which(program)
    if found is None:
        pytest.skip(
            f"{program} is not here: install the Debian package {package}, for example apt-get install {package}"
        )
    return found
