"""The relays of a node: one process a handoff, where other machines have a part, with what was said before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agent.supervisor.stream_relays import RelayRefused, RelaySettings, StreamRelays, uids_of_ranks
from liver_core.transport.relay.local import LocalRelay, NoRelay

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Relays outlive who has started them."""
    before = {*psutil.Process().children()}
    yield
    for relay in {*psutil.Process().children()} - before:
        relay.kill()


def settings(folder: Path, ports: tuple[int, int] = (0, 0)) -> RelaySettings:
    return RelaySettings("127.0.0.1", ports, uids_of_ranks(None), folder / "relays.log")


def test_a_handoff_has_one_relay_that_outlives_the_agent(tmp_path: Path):
    async def scenario() -> None:
        relays = StreamRelays(settings(tmp_path))
        name = relays.name_for("h1", ("key",), 2.5)
        assert name and name == relays.name_for("h1", ("key",)) != relays.name_for("h2", ("key",))
        assert relays.name_for("h1", ()) == "", "without a key nobody could be let in"
        token = os.urandom(32)
        memory = bytearray(token)
        at = id_of(memory)
        regions = {"token": [(at, len(token))]}
        with contextlib.closing(LocalRelay(name)) as local:
            host, port = await asyncio.to_thread(local.register, "job/2/a/0", token, ["token"], regions)
            assert host == "127.0.0.1"
            await relays.close()
            with socket.create_connection((host, port), 5):
                pass

    asyncio.run(scenario())


def test_where_no_relay_can_listen_ranks_are_told_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def scenario(taken: int) -> None:
        relays = StreamRelays(settings(tmp_path, (taken, taken)))
        name = relays.name_for("h1", ("key",))
        await asyncio.gather(*relays._tasks)
        with pytest.raises(NoRelay, match="no relay listens on this machine"):
            await asyncio.to_thread(LocalRelay(name).dial, "127.0.0.1", 1, 0.1)

    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        asyncio.run(scenario(taken.getsockname()[1]))
    assert "no stream relay, other machines read this node's ranks over gloo in the pause" in caplog.text
    assert "Address already in use" in caplog.text


def test_what_can_wait_gives_its_port_to_a_handoff(tmp_path: Path):
    async def scenario(port: int) -> None:
        relays = StreamRelays(settings(tmp_path, (port, port)))
        async with relays.for_a_while("check", ("key",)) as brief:
            await asyncio.to_thread(LocalRelay(brief)._connect().close)
            with pytest.raises(RelayRefused, match="Address already in use"):
                async with relays.for_a_while("another", ("key",)):
                    pass
            name = relays.name_for("h1", ("key",))
            await asyncio.gather(*relays._tasks)
            await asyncio.to_thread(LocalRelay(name)._connect().close)
            with pytest.raises(NoRelay):
                await asyncio.to_thread(LocalRelay(brief).dial, "127.0.0.1", 1, 0.1)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asyncio.run(scenario(port))


def test_a_handoff_that_was_called_off_leaves_its_port_to_the_next_one(tmp_path: Path):
    async def scenario(port: int) -> None:
        relays = StreamRelays(settings(tmp_path, (port, port)))
        for handoff_id in ("h1", "h2"):
            name = relays.name_for(handoff_id, ("key",))
            await asyncio.gather(*relays._tasks)
            await asyncio.to_thread(LocalRelay(name)._connect().close)
            relays.expect_nobody(handoff_id)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asyncio.run(scenario(port))


def test_a_measurement_that_is_called_off_while_its_relay_starts_leaves_none(tmp_path: Path):
    async def scenario() -> None:
        relays = StreamRelays(settings(tmp_path))

        async def measure() -> None:
            async with relays.for_a_while("check", ("key",)):
                pytest.fail("it had no time to start")

        task = asyncio.create_task(measure())
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    before = {*psutil.Process().children()}
    asyncio.run(scenario())
    assert not {*psutil.Process().children()} - before


def id_of(memory: bytearray) -> int:
    """The address of the bytes."""
    import numpy as np

    return np.frombuffer(memory, dtype=np.uint8).ctypes.data
