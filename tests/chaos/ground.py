"""What a trial stands on: processes with a mark, islands where a network is cut, small disks. All of it goes again."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
from pyroute2 import netns

from deploy.local.processes import DemoFailed, Processes
from tests.chaos.clocks import Clocks, compiler
from tests.chaos.machines import DATABASE_FOLDER, Machines
from tests.chaos.plan import EVERYWHERE, Action, TrialPlan
from tests.cluster import net_islands
from tests.cluster.net_islands import HUB, Islands
from tests.cluster.slow_islands import SlowIslands

DATABASE_ENDS_S = 20.0
UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "liver-agent.service"


@cache
def possible_actions() -> frozenset[Action]:
    """What can be done on this machine."""
    found = set(EVERYWHERE)
    if shutil.which("nsenter") and not net_islands.why_not():
        found.add(Action.CUT)
        if os.access("/dev/net/tun", os.R_OK | os.W_OK):
            found.add(Action.LATE)
    if compiler() is not None:
        found.add(Action.CLOCK)
    if _may_mount():
        found.add(Action.FULL)
    return frozenset(found)


def _may_mount() -> bool:
    if not shutil.which("mount"):
        return False
    with tempfile.TemporaryDirectory(prefix="liver-chaos-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
        subprocess.run(["umount", folder], check=False)
    return True


def names_of(plan: TrialPlan) -> list[str]:
    """All nodes that a trial may have: one comes in place of a node that has suspended the job."""
    return [f"node-{number + 1}" for number in range(len(plan.nodes) + max(1, len(plan.comes)))]


@contextmanager
def ground_for(plan: TrialPlan, folder: Path) -> Iterator[Machines]:
    """Machines to play a trial on."""
    actions = {strike.action for strike in plan.strikes}
    processes = Processes(folder / "logs")
    with ExitStack() as stack:
        islands = None
        if actions & {Action.CUT, Action.LATE}:
            names = names_of(plan)
            islands = stack.enter_context((SlowIslands if Action.LATE in actions else Islands)(names))
            for name in names:
                run_as_deployed(islands, name)
            stack.enter_context(_inside_hub(islands))
        clocks = None
        if Action.CLOCK in actions:
            clocks = Clocks(folder / "clocks")
            clocks.build()
        machines = Machines(folder, processes, islands=islands, small_disks=Action.FULL in actions, clocks=clocks)
        stack.callback(machines.unmount)
        stack.callback(processes.close)
        yield machines


def run_as_deployed(islands: Islands, name: str) -> None:
    """What the agent's unit does on a node before it starts the agent, on an island."""
    [line] = [line for line in UNIT.read_text().splitlines() if line.startswith("ExecStartPre=")]
    command = shlex.split(line.removeprefix("ExecStartPre=").lstrip("-+"))
    subprocess.run(["nsenter", f"--net={islands.path_of(name)}", "--", *command], capture_output=True, check=False)


@contextmanager
def _inside_hub(islands: Islands) -> Iterator[None]:
    """The calling thread, what it starts and its threads are in the hub meanwhile."""
    netns.pushns(f"{islands.prefix}{HUB}")
    try:
        yield
    finally:
        netns.popns()


def end_database(machines: Machines) -> list[str]:
    """The embedded database ends with the last service. One that has not is a leak, and is ended here."""
    deadline = time.monotonic() + DATABASE_ENDS_S
    while machines.database_pids() and time.monotonic() < deadline:
        threading.Event().wait(0.2)
    left = machines.database_pids()
    for pid in left:
        with suppress(psutil.Error):
            psutil.Process(pid).kill()
    return [f"{DATABASE_FOLDER} (pid {left[0]}) outlived the service"] if left else []


def end_all(machines: Machines) -> list[str]:
    """End every process of a trial, as a user would. Returns what did not end by itself."""
    try:
        machines.processes.close()
    except DemoFailed as error:
        return [str(error), *end_database(machines)]
    return end_database(machines)
