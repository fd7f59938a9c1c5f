"""Programs and libraries of Debian packages that tests use: installed where that can be done here, else the test is
skipped.

`python -m tests.debian` installs all of them at once, before a test waits for one.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

INSTALL_S = 240
PACKAGES = {
    "chromium": "chromium",
    "dbus-daemon": "dbus-daemon",
    "systemd-analyze": "systemd",
    # The userland of RDMA; libibverbs1 and libnl-route-3-200 come with it.
    "libefa.so.1": "ibverbs-providers",
}
"""By program, or by file name of a library."""
OF_BENCHMARKS = {"iperf3": "iperf3"}
"""These are not installed before tests."""


def needs(name: str) -> str:
    """Where this program or library is. Skips the test, naming the package, where it is missing and cannot be
    installed."""
    install(name)
    found = _place_of(name)
    if found is None:
        package = PACKAGES[name]
        pytest.skip(f"{name} is not here: install the Debian package {package}, for example apt-get install {package}")
    return found


def install(*names: str) -> None:
    """Those that are missing, as far as this user may."""
    packages = [(PACKAGES | OF_BENCHMARKS)[name] for name in names if _place_of(name) is None]
    if not packages or os.getuid() != 0 or shutil.which("apt-get") is None:
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ("-qq", "-o", "DPkg::Lock::Timeout=120")
    for command in (("update",), ("install", "-y", "--no-install-recommends", *packages)):
        subprocess.run(["apt-get", *options, *command], env=quiet, capture_output=True, timeout=INSTALL_S, check=False)


def _place_of(name: str) -> str | None:
    libraries = (str(path) for path in Path("/usr/lib").glob(f"*-linux-gnu*/{name}"))
    return shutil.which(name) or next(libraries, None)


if __name__ == "__main__":
    install(*PACKAGES)
