"""NIXL over libfabric, for AWS's Elastic Fabric Adapter (EFA): what it needs, and when it is refused.

libfabric emulates a read that the device cannot do, in the thread that polls the source. Three things keep it from
that: the environment, the generations of both devices, and reads that are faster than the source polls (ADR 0040).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from liver_core.device.threads import background
from liver_core.transport import efa_check
from liver_core.transport.nixl_library import loaded_libraries
from liver_core.transport.profile import PROGRESS_PERIOD_S
from liver_core.transport.protocol import Call, TransportError, WayLost
from liver_core.transport.regions import Address

VENDOR = "0x1d0f"
FIRST_GENERATION = "0xefa0"
"""PCI device of the EFA of p4d, which reads none of the later ones, and is read by none."""
ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_ENABLE_SHM_TRANSFER": "0",
    "FI_EFA_FORK_SAFE": "1",
    "NIXL_LOG_LEVEL": "FATAL",
}
"""No other provider in EFA's place, no emulated reads, no shared memory (peers of this machine have UCX). And where a
fork would leave registered memory to the child, the device must not go on reading that: ibv_fork_init(3)."""
_DEMANDED = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_ENABLE_SHM_TRANSFER")
CHECK_S = 60.0
ANSWER_S = 5.0
"""NIXL itself waits 60 s for a peer's answer to its first message, in the call that starts the first read."""
PROOF_READS, PROOF_TRIES = 6, 64
_NO_READS = "no rdma-read capability"
"""In what libfabric says when it aborts."""


def efa_devices(folder: Path = Path("/sys/class/infiniband")) -> Mapping[str, str]:
    """This machine's EFA devices, as the kernel names them ("rdmap16s27"), and their PCI device ("0xefa2")."""
    return {
        device.name: _said(device / "device/device")
        for device in sorted(folder.glob("*"))
        if _said(device / "device/vendor") == VENDOR
    }


def _said(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


@dataclass(frozen=True, slots=True)
class Efa:
    """The profile for the devices of `efa_devices`. Its endpoints read any memory of any machine that has some, too."""

    devices: Mapping[str, str]
    kind: ClassVar[str] = "nixl-efa"
    backend: ClassVar[str] = efa_check.BACKEND

    def environment(self) -> Mapping[str, str]:
        return ENVIRONMENT

    def check_here(self) -> None:
        if reason := why_not_here() if self.devices else "this machine has no EFA device":
            raise TransportError(Call.REGISTER, reason)

    def extra(self) -> Mapping[str, Any]:
        return {"efa": sorted(set(self.devices.values()))}

    def check_peer(self, peer: int, address: Address) -> None:
        theirs = address.extra.get("efa")
        if not isinstance(theirs, list):
            raise TransportError(Call.CONNECT, "not an address: it names no EFA devices", peer=peer)
        if (FIRST_GENERATION in theirs) != (FIRST_GENERATION in self.devices.values()):
            text = f"EFA of the first generation (p4d) and later ones do not read each other: {address.name!r}"
            text += f" has {', '.join(map(str, theirs))}, this machine {', '.join(self.extra()['efa'])}"
            raise TransportError(Call.CONNECT, text, peer=peer)

    def prove(self, peer: int, read: Callable[[], None], deadline: float) -> None:
        """The source answers an emulated read when it polls, so in the time between two polls only reads that the
        device does can follow each other."""
        _answered(peer, read, deadline)
        for _ in range(PROOF_TRIES):
            start = time.monotonic()
            for _ in range(PROOF_READS):
                read()
                if time.monotonic() - start >= PROGRESS_PERIOD_S:
                    break
            else:
                return
        text = f"{PROOF_READS} reads never took less than {PROGRESS_PERIOD_S} s: libfabric may emulate them"
        raise TransportError(Call.CONNECT, text, peer=peer)


def _answered(peer: int, read: Callable[[], None], deadline: float) -> None:
    """Read once; raise WayLost if that takes too long. The call that waits then ends by itself, and what it reads into
    is a token's place."""
    outcome: list[Exception | None] = []

    def run() -> None:
        try:
            read()
        except Exception as error:
            outcome.append(error)
        else:
            outcome.append(None)

    first = background(run, name="efa-first-read")
    first.start()
    first.join(max(0.0, min(ANSWER_S, deadline - time.monotonic())))
    if not outcome:
        text = (
            "a peer does not answer over EFA: the security group has to allow all traffic from and to itself, and both"
        )
        raise WayLost(Call.CONNECT, f"{text} machines have to be in one availability zone", peer=peer)
    if outcome[0] is not None:
        raise outcome[0]


@functools.cache
def why_not_here() -> str:
    """Empty if this process can read over EFA; found out once, in seconds, by a child process."""
    for name in _DEMANDED:
        if (value := os.environ.get(name, ENVIRONMENT[name])) != ENVIRONMENT[name]:
            return f"{name} is {value!r} in the environment, and EFA needs {ENVIRONMENT[name]!r}: unset it"
    needed = [path for path in loaded_libraries() if Path(path).name.startswith(("libcuda", "libfabric"))]
    command = [sys.executable, "-m", "liver_core.transport.efa_check", *needed]
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return why_failed(command, environment)


def why_failed(command: list[str], environment: Mapping[str, str]) -> str:
    """What a check that is started so says; empty for `efa_check.OK`."""
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"EFA could not be checked: {error}"
    said = done.stdout.strip().rpartition("\n")[2]
    if said:
        return "" if said == efa_check.OK else said
    if _NO_READS in done.stderr:
        return "this machine's EFA cannot read the memory of another machine by itself, and libfabric would emulate it"
    return f"the check of EFA ended with status {done.returncode}: {done.stderr.strip()[-200:]}"
