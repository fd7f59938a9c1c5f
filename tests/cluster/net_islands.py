"""Network namespaces for tests that cut a network: an island for each node, and a bridge that any can be cut from.

Needs the right to make namespaces (root, or CAP_SYS_ADMIN and CAP_NET_ADMIN); `why_not` says what stands in the way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from pyroute2 import NetNS, netns
from pyroute2.netlink.exceptions import NetlinkError

HUB = "hub"
_NETWORK, PREFIX_LENGTH = "10.213.0", 24


def why_not() -> str:
    """Why this process cannot have islands; empty when it can."""
    try:
        with Islands("a"):
            return ""
    except (OSError, NetlinkError) as error:
        return f"network namespaces cannot be made here: {error}"


def enter(prefix: str, name: str) -> None:
    """Move the calling thread, and those it starts, into an island; call it before any other thread is there."""
    netns.setns(f"{prefix}{name}")


def address_of(name: str, names: Sequence[str]) -> str:
    """Of an island, or of the hub."""
    return f"{_NETWORK}.{1 if name == HUB else 10 + names.index(name)}"


class Islands:
    """A hub and one namespace for each of `names`. Leaving the context takes all away."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.prefix = f"liver-{os.getpid()}-"

    def __enter__(self) -> Self:
        try:
            for name in (HUB, *self.names):
                netns.create(self.prefix + name)
            self._join_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for name in (HUB, *self.names):
            with contextlib.suppress(OSError):
                netns.remove(self.prefix + name)

    def path_of(self, name: str) -> str:
        """The file by which a process of another program enters an island."""
        return f"{netns.NETNS_RUN_DIR}/{self.prefix}{name}"

    def inside(self, name: str) -> tuple[str, ...]:
        """Before a command line: run it in an island."""
        return ("ip", "netns", "exec", f"{self.prefix}{name}")

    def thread_in(self, name: str) -> ThreadPoolExecutor:
        """One thread that is in an island: what it opens is there, whoever uses it then."""
        return ThreadPoolExecutor(1, initializer=enter, initargs=(self.prefix, name))

    def cut(self, name: str) -> None:
        """From now on nothing gets from or to this island, or the hub; nobody is told. The islands keep each other."""
        self._connect(name, there=False)

    def join(self, name: str) -> None:
        """It is back."""
        self._connect(name, there=True)

    def _join_all(self) -> None:
        with NetNS(self.prefix + HUB) as hub:
            hub.link("add", ifname="bridge", kind="bridge")
            bridge = _index(hub, "bridge")
            hub.addr("add", index=bridge, address=address_of(HUB, self.names), prefixlen=PREFIX_LENGTH)
            hub.link("set", index=bridge, state="up")
            hub.link("set", index=_index(hub, "lo"), state="up")
            for name in self.names:
                there = {"ifname": "eth0", "net_ns_fd": self.prefix + name}
                hub.link("add", ifname=f"to-{name}", kind="veth", peer=there)
                hub.link("set", index=_index(hub, f"to-{name}"), master=bridge, state="up")
        for name in self.names:
            with NetNS(self.prefix + name) as island:
                eth0 = _index(island, "eth0")
                island.addr("add", index=eth0, address=address_of(name, self.names), prefixlen=PREFIX_LENGTH)
                for index in (eth0, _index(island, "lo")):
                    island.link("set", index=index, state="up")

    def _connect(self, name: str, *, there: bool) -> None:
        with NetNS(self.prefix + HUB) as hub:
            if name == HUB:
                address, bridge = address_of(HUB, self.names), _index(hub, "bridge")
                hub.addr("add" if there else "del", index=bridge, address=address, prefixlen=PREFIX_LENGTH)
            else:
                hub.link("set", index=_index(hub, f"to-{name}"), state="up" if there else "down")


def _index(where: Any, ifname: str) -> int:
    return where.link_lookup(ifname=ifname)[0]
