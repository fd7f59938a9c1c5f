"""A machine of a real job is shut down: its agent hears it of logind alone, the job leaves, and the shutdown waits.

Service with embedded PostgreSQL, agents and Megatron ranks are real, and so is the D-Bus of each machine; logind is a
double, for a test cannot shut a machine down.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dbus_fast")

from deploy.local.cluster import Cluster
from deploy.local.processes import Processes, Started
from tests.agent.notices.logind_double import Logind, own_bus
from tests.cluster.real_service import WORLD, RealJob, real_job

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(600)]
NODES = ("n1", "n2", "n3")
DELAY_S = 150


class Machines(Cluster):
    """Each agent is on a machine with a system bus of its own."""

    def __init__(self, folder: Path, processes: Processes, buses: dict[str, str]) -> None:
        super().__init__(folder, processes)
        self._buses = buses

    def _start_agent(self, node_id: str, command: list[str], environment: dict[str, str]) -> Started:
        bus = {"DBUS_SYSTEM_BUS_ADDRESS": self._buses[node_id]}
        return super()._start_agent(node_id, command, environment | bus)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture
def buses(tmp_path: Path) -> Iterator[dict[str, tuple[str, Logind, Loop]]]:
    """By node: the address of its bus, the logind on it, and the loop that this lives in."""
    with ExitStack() as stack:
        found = {}
        for node_id in NODES:
            folder = tmp_path / f"machine-{node_id}"
            folder.mkdir()
            address, logind, loop = stack.enter_context(own_bus(folder)), Logind(delay_s=DELAY_S), Loop()
            stack.callback(loop.close)
            loop.run(logind.start(address))
            found[node_id] = address, logind, loop
        yield found


def test_a_job_leaves_a_machine_that_is_shut_down_while_the_shutdown_waits(buses) -> None:
    machines = partial(Machines, buses={name: address for name, (address, _, _) in buses.items()})
    with real_job(RealJob, machines) as real:
        real.start(*NODES)
        leaver = real.job()["nodes"][0]
        _, logind, loop = buses[leaver]
        real.wait("the agent's lock", lambda: logind.held == 1)

        loop.run(logind.prepare(True))
        real.wait("the job to leave", lambda: leaver not in real.job()["nodes"])
        real.wait("the shutdown to go on", lambda: logind.held == 0)
        real.trains_on()

        (handoff,) = real.api.handoffs(real.job_id)
        assert (handoff["state"], handoff["leaving"]) == ("active", [leaver])
        assert real.job()["lost_steps"] == 0 and len(real.job()["nodes"]) == WORLD
        (notice,) = real.api.get("/api/v1/notices", node_id=leaver)
        assert [item["source"] for item in notice["channels"]] == ["shutdown"]
