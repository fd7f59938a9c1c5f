"""What a rank says to the relay of its own machine: "peers may read this of me", and "connect me to that relay".

The rank never learns the handoff's key: it is given connections on which the relays have proved themselves already.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from liver_core.transport.relay.messages import WireError
from liver_core.transport.relay.sockets import peer_process, receive_local, send_local

ANSWER_S = 5.0
DEVICE_S = 20.0
"""More, to load CUDA's driver, make a context and open what lies on devices."""
RETRY_S = 0.05
DIAL_S = 5.0
"""A firewall that drops packets answers nothing, and there is another way to read."""


class NoRelay(Exception):
    """The relay of this machine does not do what it was asked for. The text says why."""


@dataclass(frozen=True, slots=True)
class LocalRelay:
    """`name`: of the abstract unix socket that the relay of this handoff listens on."""

    name: str

    def register(
        self,
        endpoint: str,
        token: bytes,
        tokens: Sequence[str],
        regions: Mapping[str, Sequence[tuple[int, ...]]],
        allocations: Sequence[tuple[str, str]] = (),
    ) -> tuple[socket.socket, str, int]:
        """Have the relay serve `regions` under this name as long as the returned socket is open; also where peers reach
        it. Of each piece: address and bytes, on a device as `Exports` locates it, whose `allocations` go with it. The
        relay has read `token` in those regions that `tokens` names. Raises NoRelay."""
        connection = self._connect()
        message = {"register": endpoint, "tokens": tokens, "regions": dict(regions), "allocations": allocations}
        try:
            connection.settimeout(ANSWER_S + (DEVICE_S if allocations else 0.0))
            said = self._ask(connection, message)[0]
            if said.get("tokens") != [token.hex()] * len(tokens):
                raise NoRelay("the relay read other bytes than there are: it sees other processes than this one")
            host, port = str(said["host"]), int(said["port"])
        except (KeyError, TypeError, ValueError) as error:
            connection.close()
            raise NoRelay(f"the relay answered {error!r}") from None
        except NoRelay:
            connection.close()
            raise
        return connection, host, port

    def dial(self, host: str, port: int, seconds: float) -> socket.socket:
        """A connection to the relay of another machine, which has proved that it is of this handoff. Raises NoRelay."""
        with self._connect() as connection:
            connection.settimeout(seconds + ANSWER_S)
            _, descriptors = self._ask(connection, {"dial": [host, port], "seconds": seconds})
        if len(descriptors) != 1:
            raise NoRelay("the relay of this machine passed on no connection")
        return socket.socket(fileno=descriptors[0])

    def _connect(self) -> socket.socket:
        """It may be starting just now."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(ANSWER_S)
            try:
                connection.connect(f"\0{self.name}")
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise NoRelay(f"no relay listens on this machine: {error.strerror or error}") from None
                time.sleep(RETRY_S)
            else:
                _, uid = peer_process(connection)
                if uid not in (0, os.geteuid()):
                    connection.close()
                    raise NoRelay(f"user {uid} listens in the relay's place")
                return connection

    def _ask(self, connection: socket.socket, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        try:
            send_local(connection, message)
            said, descriptors = receive_local(connection)
        except (OSError, WireError) as error:
            raise NoRelay(f"the relay of this machine does not answer: {error}") from None
        if "error" in said:
            raise NoRelay(str(said["error"]))
        return said, descriptors
