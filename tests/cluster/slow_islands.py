"""Islands whose packets a process of ours carries from one to the other, so that those of some can be late.

The kernel's own way (netem) is a module that many machines do not have; TUN devices are everywhere.

    python -m tests.cluster.slow_islands PREFIX NAME...     carries packets until its standard input ends
"""

from __future__ import annotations

import fcntl
import heapq
import math
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from pyroute2 import NetNS, netns

from tests.cluster.net_islands import HUB, PREFIX_LENGTH, Islands, address_of

DEVICE = "wire"
PACKET_BYTES_MAX = 65_000
QUEUE_PACKETS = 5_000
END_S = 5.0
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class SlowIslands(Islands):
    """As Islands, and packets from and to an island, or the hub, can be `late`."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._carrier: subprocess.Popen[str] | None = None

    def close(self) -> None:
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            assert carrier.stdin is not None
            with suppress(OSError):
                carrier.stdin.close()
            try:
                carrier.wait(END_S)
            except subprocess.TimeoutExpired:
                carrier.kill()
                carrier.wait()
        super().close()

    def cut(self, name: str) -> None:
        self.late(name, math.inf)

    def join(self, name: str) -> None:
        self.late(name, 0.0)

    def late(self, name: str, seconds: float, lost: float = 0.0, early: float = 0.0) -> None:
        """From now on packets from and to this island take so long; infinity: they are lost. `lost`: the share of them
        that is lost anyway, `early`: the share that is not late, and so overtakes those before it."""
        carrier = self._carrier
        assert carrier is not None and carrier.stdin is not None
        carrier.stdin.write(f"{name} {seconds} {lost} {early}\n")
        carrier.stdin.flush()

    def _join_all(self) -> None:
        command = [sys.executable, "-m", "tests.cluster.slow_islands", self.prefix, *self.names]
        self._carrier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._carrier.stdout is not None
        if self._carrier.stdout.readline() != "carrying\n":
            raise OSError("the carrier of packets did not start")


class Carrier:
    """Reads packets of each island and writes them to the one they are for, at once or when they are due."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        self._wires: dict[bytes, tuple[str, int]] = {}
        self._late: dict[str, tuple[float, float, float]] = {}
        self._random = random.Random(1)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        for name in (HUB, *names):
            address = address_of(name, names)
            self._wires[socket.inet_aton(address)] = (name, _wire_in(prefix + name, address))

    def run(self) -> None:
        """Until standard input ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ)
            for name, wire in self._wires.values():
                selector.register(wire, selectors.EVENT_READ, name)
            while True:
                for key, _ in selector.select(self._send_due()):
                    if key.data is not None:
                        self._take(key.data, key.fd)
                    elif not self._obey(sys.stdin.readline()):
                        return

    def _obey(self, line: str) -> bool:
        if words := line.split():
            name, seconds, lost, early = words
            self._late[name] = float(seconds), float(lost), float(early)
        return bool(line)

    def _take(self, source: str, wire: int) -> None:
        with suppress(BlockingIOError):
            packet = os.read(wire, PACKET_BYTES_MAX + 64)
            # The address that an IPv4 packet is for; another protocol has no way here.
            to, target = self._wires.get(packet[16:20], ("", -1))
            if packet[0] >> 4 != 4 or target < 0:
                return
            delay_s, lost, early = max(self._late.get(name, (0.0, 0.0, 0.0)) for name in (source, to))
            if delay_s == math.inf or self._random.random() < lost:
                return
            if self._random.random() < early:
                delay_s = 0.0
            self._number += 1
            heapq.heappush(self._waiting, (time.monotonic() + delay_s, self._number, target, packet))
            self._send_due()

    def _send_due(self) -> float | None:
        """Seconds to the next packet that is due, None without any."""
        while self._waiting:
            wait_s = self._waiting[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, _, target, packet = heapq.heappop(self._waiting)
            # Where there is no room the packet is lost, as on any wire.
            with suppress(OSError):
                os.write(target, packet)
        return None


def _wire_in(namespace: str, address: str) -> int:
    """The descriptor of a new TUN device in a namespace, with this address."""
    netns.pushns(namespace)
    try:
        wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(wire, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    finally:
        netns.popns()
    with NetNS(namespace) as there:
        [index], [own] = there.link_lookup(ifname=DEVICE), there.link_lookup(ifname="lo")
        there.addr("add", index=index, address=address, prefixlen=PREFIX_LENGTH)
        there.link("set", index=index, mtu=PACKET_BYTES_MAX, txqlen=QUEUE_PACKETS, state="up")
        there.link("set", index=own, state="up")
    return wire


if __name__ == "__main__":
    carrier = Carrier(sys.argv[1], sys.argv[2:])
    print("carrying", flush=True)
    carrier.run()
