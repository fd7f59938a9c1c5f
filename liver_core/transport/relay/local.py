"""What a rank says to the relay of its own machine: "peers may read this of me", and "connect me to that relay".

The rank never learns the handoff's key: it is given connections on which the relays have proved themselves already.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from liver_core.transport.relay.messages import WireError
from liver_core.transport.relay.rank_user import allow
from liver_core.transport.relay.sockets import hang_up, peer_process, receive_local, send_local

ANSWER_S = 5.0
DEVICE_S = 20.0
"""More, to load CUDA's driver, make a context and open what lies on devices."""
RETRY_S = 0.05
DIAL_S = 5.0
"""A firewall that drops packets answers nothing, and there is another way to read."""


class NoRelay(Exception):
    """The relay of this machine does not do what it was asked for. The text says why."""


class LocalRelay:
    """`name`: of the abstract unix socket that the relay of this handoff listens on. It serves what was registered, and
    stays for whoever has asked it to dial, until `close`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._registration: socket.socket | None = None
        self._dialler: socket.socket | None = None

    def register(
        self,
        endpoint: str,
        token: bytes,
        tokens: Sequence[str],
        regions: Mapping[str, Sequence[tuple[int, ...]]],
        allocations: Sequence[tuple[str, str]] = (),
    ) -> tuple[str, int]:
        """Have the relay serve `regions` under this name: where peers reach it.

        Of each piece: address and bytes, on a device as `Exports` locates it, whose `allocations` go with it. The relay
        has read `token` in those regions that `tokens` names. Once. Raises NoRelay.
        """
        connection = self._connect()
        message = {"register": endpoint, "tokens": tokens, "regions": dict(regions), "allocations": allocations}
        try:
            allow(peer_process(connection)[0])
            connection.settimeout(ANSWER_S + (DEVICE_S if allocations else 0.0))
            said = _ask(connection, message)[0]
            if said.get("tokens") != [token.hex()] * len(tokens):
                raise NoRelay("the relay read other bytes than there are: it sees other processes than this one")
            where = str(said["host"]), int(said["port"])
        except (KeyError, TypeError, ValueError) as error:
            hang_up(connection)
            raise NoRelay(f"the relay answered {error!r}") from None
        except NoRelay:
            hang_up(connection)
            raise
        self._registration = connection
        return where

    def dial(self, host: str, port: int, seconds: float) -> socket.socket:
        """A connection to the relay of another machine, which has proved that it is of this handoff. Raises NoRelay."""
        if self._dialler is None:
            self._dialler = self._connect()
        self._dialler.settimeout(seconds + ANSWER_S)
        try:
            _, descriptors = _ask(self._dialler, {"dial": [host, port], "seconds": seconds})
        except NoRelay:
            # What it answers later must not be taken for the answer to another question.
            dialler, self._dialler = self._dialler, None
            hang_up(dialler)
            raise
        if len(descriptors) != 1:
            raise NoRelay("the relay of this machine passed on no connection")
        return socket.socket(fileno=descriptors[0])

    def close(self) -> None:
        """The relay serves nothing of this endpoint any more. What it has connected stays so."""
        for connection in (self._registration, self._dialler):
            if connection is not None:
                hang_up(connection)
        self._registration = self._dialler = None

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
                uid = peer_process(connection)[1].uid
                if uid not in (0, os.geteuid()):
                    connection.close()
                    raise NoRelay(f"user {uid} listens in the relay's place")
                return connection


def _ask(connection: socket.socket, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    try:
        send_local(connection, message)
        said, descriptors = receive_local(connection)
    except (OSError, WireError) as error:
        raise NoRelay(f"the relay of this machine does not answer: {error}") from None
    if "error" in said:
        raise NoRelay(str(said["error"]))
    return said, descriptors
