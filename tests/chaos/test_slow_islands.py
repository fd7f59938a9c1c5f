"""Packets of islands that are carried by a process of ours arrive, and late where they shall be late."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster import net_islands
from tests.cluster.net_islands import address_of
from tests.cluster.slow_islands import SlowIslands

NAMES = ("a", "b")
LATE_S = 0.2

pytestmark = pytest.mark.skipif(bool(net_islands.why_not()), reason="network namespaces cannot be made here")


@pytest.fixture
def islands() -> Iterator[SlowIslands]:
    with SlowIslands(NAMES) as made:
        yield made


def test_packets_are_late_from_and_to_one_island_until_it_is_over(islands: SlowIslands):
    echoes = Echo(islands)
    usual_s = echoes.round_trip_s()
    islands.late("a", LATE_S)
    late_s = echoes.round_trip_s()
    islands.late("a", LATE_S, early=1.0)
    early_s = echoes.round_trip_s()
    islands.late("a", 0.0)
    assert usual_s < LATE_S and late_s >= 2 * LATE_S and early_s < LATE_S
    assert echoes.round_trip_s() < LATE_S


def test_no_packet_arrives_while_an_island_is_cut_off_and_all_do_afterwards(islands: SlowIslands):
    echoes = Echo(islands)
    islands.cut("a")
    again = threading.Timer(3 * LATE_S, islands.join, ("a",))
    again.start()
    assert echoes.round_trip_s() >= 2 * LATE_S
    again.join()


def test_a_lot_of_bytes_arrive_whole(islands: SlowIslands):
    echoes = Echo(islands)
    sent = bytes(range(256)) * 8_192
    assert echoes.echo(sent) == sent


class Echo:
    """A server on island b, and a client on island a."""

    def __init__(self, islands: SlowIslands) -> None:
        self._server = self._socket_on(islands, "b")
        self._server.bind((address_of("b", NAMES), 0))
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        self._client = self._socket_on(islands, "a")
        self._client.settimeout(10.0)
        self._client.connect(self._server.getsockname())
        self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round_trip_s(self) -> float:
        began = time.monotonic()
        assert self.echo(b"x") == b"x"
        return time.monotonic() - began

    def echo(self, sent: bytes) -> bytes:
        threading.Thread(target=self._client.sendall, args=(sent,), daemon=True).start()
        found = b""
        while len(found) < len(sent):
            found += self._client.recv(1 << 16)
        return found

    def _serve(self) -> None:
        peer, _ = self._server.accept()
        while data := peer.recv(1 << 16):
            peer.sendall(data)

    @staticmethod
    def _socket_on(islands: SlowIslands, name: str) -> socket.socket:
        """A socket belongs to the namespace of the thread that made it."""
        made: list[socket.socket] = []

        def make() -> None:
            net_islands.enter(islands.prefix, name)
            made.append(socket.socket())

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]
