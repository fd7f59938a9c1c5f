"""A machine answers while its kernel accepts connections, whatever its agent does."""

import asyncio
import contextlib
import socket

import pytest

from agent.peer.probe import Probes, Reached, answer_of
from tests.agent.waiting import eventually


@pytest.fixture
def port():
    """A port that accepts connections, and that nobody serves."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield listener.getsockname()[1]
    listener.close()


def test_a_port_that_nobody_serves_answers(port: int):
    assert asyncio.run(answer_of(f"http://127.0.0.1:{port}")) is Reached.ACCEPTED


def test_a_port_that_nobody_listens_on_refuses(port: int):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert asyncio.run(answer_of(f"http://127.0.0.1:{unused.getsockname()[1]}")) is Reached.REFUSED


def test_a_machine_that_drops_packets_does_not_answer_and_is_not_waited_for_long():
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # The kernel drops what comes once the queue is full.
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(full.getsockname())
        assert asyncio.run(answer_of(f"http://127.0.0.1:{full.getsockname()[1]}", timeout_s=0.2)) is Reached.NONE


def test_only_nodes_that_are_asked_for_and_answer_are_named(port: int):
    urls = {"here": f"http://127.0.0.1:{port}", "gone": "http://127.0.0.1:1", "else": f"http://127.0.0.1:{port}"}

    async def run() -> None:
        probes = Probes()
        probes.tick(["here", "gone", "unknown"], urls)
        await eventually(probes.answering, "an answer")
        assert probes.answering() == ("here",)
        probes.tick([], urls)
        assert probes.answering() == (), "nobody asks any more"
        await probes.close()

    asyncio.run(run())
