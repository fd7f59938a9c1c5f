"""Another user to run jobs as, and a way to start agents where that user can read what ranks import."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB_USER = "nobody"


@pytest.fixture(scope="session")
def job_user() -> pwd.struct_passwd:
    if os.geteuid() != 0:
        pytest.skip("only root can run a job as another user")
    try:
        return pwd.getpwnam(JOB_USER)
    except KeyError:
        pytest.skip(f"there is no user {JOB_USER} here")


@pytest.fixture(scope="session")
def through(job_user: pwd.struct_passwd) -> tuple[str, ...]:
    """What starts a command so that anybody can enter the folders of the interpreter and of this tree. Where such a
    folder lies in a closed one, as a home, that is a mount namespace in which the closed one holds only this."""
    closed: dict[Path, list[Path]] = {}
    for needed in {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}:
        for parent in reversed((needed / "x").parents):
            if not parent.stat().st_mode & 0o001:
                closed.setdefault(parent, []).append(needed)
                break
    if not closed:
        return ()
    lines = ["set -e", "mount -t tmpfs -o mode=755 tmpfs /mnt"]
    for parent, kept in closed.items():
        for number, path in enumerate(kept):
            lines += [f"mkdir -p /mnt{parent}/{number}", f"mount --bind {path} /mnt{parent}/{number}"]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {parent}"]
        for number, path in enumerate(kept):
            lines += [f"mkdir -p {path}", f"mount --bind /mnt{parent}/{number} {path}"]
    command = ("unshare", "--mount", "sh", "-c", "\n".join([*lines, 'exec "$@"']), "sh")
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip(f"{JOB_USER} cannot enter {', '.join(map(str, closed))}, and mount namespaces cannot be had here")
    return command
