"""The two ends of a measured wire, and what they say where something is in the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.protocol.wires import WireSpeed
from agent.supervisor import wire_child
from agent.supervisor.child_entry import LastStep
from agent.supervisor.child_hello import SilentChild, hello_of
from agent.supervisor.process import ProcessIdentity, own_identity
from agent.supervisor.wire_checks import WireError, _read

NOBODY = ProcessIdentity(2**22 + 1, -1.0)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    path = str(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        yield listener, path


def said_by(listener: socket.socket, path: str, spec: dict[str, Any], end: Any) -> dict[str, Any]:
    def run() -> None:
        with contextlib.suppress(Exception):
            end(spec, listener, LastStep())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    said = asyncio.run(hello_of(path, own_identity(), 20.0))
    thread.join(20)
    return said


@pytest.mark.parametrize("end", [wire_child.serve, wire_child.read])
def test_an_end_that_cannot_be_made_says_why(control: tuple[socket.socket, str], end: Any):
    spec = {"name": "w", "host": "203.0.113.1", "relay": "", "rdma": False}
    spec |= {"store": {"host": "203.0.113.1", "port": 9}, "address": "", "bytes_max": 1}
    said = said_by(*control, spec, end)
    assert "203.0.113.1" in said["error"] or "Cannot assign requested address" in said["error"], said


def test_a_child_that_ends_with_a_connection_it_had_not_taken_has_said_nothing(control: tuple[socket.socket, str]):
    listener, path = control

    async def scenario() -> None:
        asking = asyncio.create_task(hello_of(path, NOBODY, 10.0))
        assert (await asyncio.to_thread(select.select, [listener], [], [], 5.0))[0], "it has connected"
        listener.close()
        with pytest.raises(SilentChild, match="ended before it said anything"):
            await asking

    asyncio.run(scenario())


def test_what_no_agent_could_tell_is_an_error_that_names_the_field():
    with pytest.raises(WireError, match="bytes_per_s"):
        _read(WireSpeed, json.loads('{"wire": "relay", "bytes_per_s": -1.0, "latency_s": 0.0}'))
