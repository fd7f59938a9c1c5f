"""How soon a connection goes on after a cut, on nodes that were set up as `deploy/` does it."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from pyroute2 import netns

from tests.chaos.ground import possible_actions, run_as_deployed
from tests.chaos.plan import Action
from tests.cluster.net_islands import Islands, address_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
CUT_S, WITHIN_S = 7.0, 2.5
"""By default TCP would try next some six seconds after a cut of this length."""
PORT = 29_400


class Connection:
    """From one island to another. A socket stays where it was made, and a thread where it was sent."""

    def __init__(self, islands: Islands) -> None:
        self._islands = islands
        self.heard = threading.Semaphore(0)
        self._ready = threading.Event()
        self.near: socket.socket | None = None
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._hear, self._connect)]
        for each in self._threads:
            each.start()
        self._threads[1].join(20.0)

    def _hear(self) -> None:
        netns.pushns(f"{self._islands.prefix}far")
        with socket.create_server((address_of("far", self._islands.names), PORT)) as server:
            self._ready.set()
            with server.accept()[0] as there:
                while there.recv(1):
                    self.heard.release()

    def _connect(self) -> None:
        netns.pushns(f"{self._islands.prefix}near")
        if self._ready.wait(20.0):
            self.near = socket.create_connection((address_of("far", self._islands.names), PORT), 20.0)


def test_what_was_sent_while_a_node_was_cut_off_arrives_soon_after() -> None:
    if Action.CUT not in possible_actions():
        pytest.skip("needs network namespaces, and nsenter")
    if not Path("/proc/sys/net/ipv4/tcp_rto_max_ms").exists():
        pytest.skip("this kernel (before 6.15) cannot be told how long TCP waits at most")
    with Islands(("near", "far")) as islands:
        for name in islands.names:
            run_as_deployed(islands, name)
        connection = Connection(islands)
        assert connection.near is not None
        with connection.near as near:
            near.sendall(b"1")
            assert connection.heard.acquire(timeout=20.0)
            islands.cut("far")
            near.sendall(b"2")
            assert not connection.heard.acquire(timeout=CUT_S)
            islands.join("far")
            began = time.monotonic()
            assert connection.heard.acquire(timeout=30.0)
            assert time.monotonic() - began < WITHIN_S
