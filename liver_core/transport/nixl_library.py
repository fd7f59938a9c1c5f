"""Loading NIXL. Imports no torch, so that a process that only looks at NIXL starts fast."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Mapping
from typing import Any


def load_nixl(environment: Mapping[str, str]) -> Any:
    """Import NIXL under these settings; what the process was started with wins. Safe before fork, takes 0.1 s."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    _load_netlink_of_the_system()
    from nixl import _api

    logging.getLogger("nixl").setLevel(logging.ERROR)
    return _api


def _load_netlink_of_the_system() -> None:
    """Load the system's libnl-route, if there is one, where it finds only its own symbols.

    NIXL's wheel has a copy of libnl-route, and UCX's module for EFA loads the system's as well, through libefa and
    libibverbs. Loaded by that module, the system's would find the functions of the wheel's copy. Those reject what it
    registers, because they have it already, and at the end of the process it takes back what is in no list: SIGSEGV.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200")


def loaded_libraries() -> tuple[str, ...]:
    """The paths of all shared libraries that this process has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
    return tuple(sorted(path for path in paths if ".so" in path))
