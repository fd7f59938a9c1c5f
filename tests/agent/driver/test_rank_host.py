"""The rank processes of one job, where a process is only just being started."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from agent.driver.lifecycle import Births
from agent.driver.rank_host import Launch, RankHost
from agent.protocol.sync import DesiredState
from agent.supervisor.records import SlotKey

KEY = SlotKey("job", 0)


class Supervisor:
    """A fork takes until `may_start` is set. `stopped`: the processes that were told to end."""

    def __init__(self) -> None:
        self.states: dict[SlotKey, Any] = {}
        self.may_start = asyncio.Event()
        self.stopped: list[SlotKey] = []

    async def launch(self, spec: Any, origin: str) -> None:
        await self.may_start.wait()
        self.states[KEY] = SimpleNamespace(pulse=SimpleNamespace(median_s=lambda: 0.0))

    async def stop(self, key: SlotKey, reason: str, grace_s: float) -> None:
        assert key in self.states, "there was no process yet to be told anything"
        self.stopped.append(key)


@pytest.mark.parametrize("wish", [DesiredState.STOP, DesiredState.SUSPENDED])
def test_a_job_that_is_ended_while_its_rank_is_being_started_ends(wish: DesiredState):
    async def run() -> list[SlotKey]:
        supervisor = Supervisor()

        async def failed(slot: int, reason: Any) -> None:
            raise AssertionError(reason)

        async def cancel(reason: Any) -> None:
            return None

        host = RankHost("job", cast(Any, supervisor), failed)
        lead = SimpleNamespace(cancel=cancel)
        births = Births(cast(Any, None), "job", cast(Any, None), host, cast(Any, lead))
        host.launch(Launch(cast(Any, SimpleNamespace(slot=0, rank=0)), str(uuid4())))
        await asyncio.sleep(0)
        await births.consider(cast(Any, SimpleNamespace(desired=wish, saves_at_end=False)), {})
        supervisor.may_start.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*host._slot(0).tasks)
        await host.close()
        return supervisor.stopped

    assert asyncio.run(run()) == [KEY]
