"""Programs of Debian packages that tests run: installed where that can be done here, else the test is skipped.

`python -m tests.debian` installs all of them at once, before a test waits for one.
"""

import os
import shutil
import subprocess

import pytest

INSTALL_S = 240
PACKAGES = {"chromium": "chromium", "dbus-daemon": "dbus-daemon", "systemd-analyze": "systemd"}
"""By program."""


def needs(program: str) -> str:
    """The program's path. Skips the test, naming the package, where it is missing and cannot be installed."""
    install(program)
    found = shutil.which(program)
    if found is None:
        package = PACKAGES[program]
        pytest.skip(
            f"{program} is not here: install the Debian package {package}, for example apt-get install {package}"
        )
    return found


def install(*programs: str) -> None:
    """Those that are missing, as far as this user may."""
    packages = [PACKAGES[program] for program in programs if shutil.which(program) is None]
    if not packages or os.getuid() != 0 or shutil.which("apt-get") is None:
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ("-qq", "-o", "DPkg::Lock::Timeout=120")
    for command in (("update",), ("install", "-y", "--no-install-recommends", *packages)):
        subprocess.run(["apt-get", *options, *command], env=quiet, capture_output=True, timeout=INSTALL_S, check=False)


if __name__ == "__main__":
    install(*PACKAGES)
