"""Blocking exchanges over sockets, each with an end: whole messages, both sides of the handshake, local messages."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from liver_core.transport.relay.messages import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAC_BYTES,
    NONCE_BYTES,
    WELCOME,
    WireError,
    challenge,
    hello,
    is_proof,
    proof,
)

HANDSHAKE_S = 5.0
SILENCE_MS = 10_000
"""So long may sent bytes stay unacknowledged, and a connection that is used silent, before it counts as cut."""
BUFFER_BYTES = 4 << 20
LOCAL_BYTES_MAX = 16 << 20
_CREDENTIALS = struct.Struct("3i")
_LOCAL = struct.Struct("<I")


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. Raises ConnectionError at the end of the connection, OSError otherwise."""
    found = bytearray(size)
    receive_into(connection, memoryview(found))
    return bytes(found)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill `view`. Raises as `receive`."""
    while len(view):
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the other side has closed the connection")
        view = view[got:]


def send_all(connection: socket.socket, parts: Sequence[Any]) -> None:
    """Send buffers one after another, without joining them in memory."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        sent = connection.sendmsg(left)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if left:
            left[0] = left[0][sent:]


def prepare(connection: socket.socket) -> None:
    """Large buffers, no delay, and an end for a connection whose other side has fallen silent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def dial(host: str, port: int, source: str, keys: Sequence[bytes], deadline: float) -> socket.socket:
    """A connection to the relay at this address, which has proved that it is of this handoff. `source`: the local
    address. Raises OSError or WireError."""
    connection = socket.create_connection((host, port), timeout=_left(deadline), source_address=(source, 0))
    try:
        prepare(connection)
        nonce = os.urandom(NONCE_BYTES)
        connection.sendall(hello(keys, nonce))
        connection.sendall(proof(keys, nonce, receive(connection, CHALLENGE_BYTES)))
        connection.settimeout(_left(deadline))
        if receive(connection, len(WELCOME)) != WELCOME:
            raise WireError("the relay does not let this reader in")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def admit(connection: socket.socket, keys: Sequence[bytes]) -> None:
    """The relay's side of `dial`. Raises OSError or WireError for who is not let in."""
    connection.settimeout(HANDSHAKE_S)
    prepare(connection)
    theirs, nonce = receive(connection, HELLO_BYTES), os.urandom(NONCE_BYTES)
    answer, key = challenge(keys, theirs, nonce)
    connection.sendall(answer)
    if key is None:
        raise WireError("a reader with another key")
    if not is_proof(key, theirs, nonce, receive(connection, MAC_BYTES)):
        raise WireError("a reader that does not hold the key")
    connection.sendall(WELCOME)
    connection.settimeout(None)


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a unix socket, as the kernel says."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def send_local(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """One JSON message over a unix socket, with open files."""
    data = json.dumps(message).encode()
    if descriptors:
        socket.send_fds(connection, [_LOCAL.pack(len(data)) + data], list(descriptors))
    else:
        connection.sendall(_LOCAL.pack(len(data)) + data)


def receive_local(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next JSON message and the open files that came with it. Raises OSError or WireError."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LOCAL.size, 1)
    try:
        head += receive(connection, _LOCAL.size - len(head)) if head else b""
        if not head:
            raise ConnectionError("the other side has closed the connection")
        (size,) = _LOCAL.unpack(head)
        if size > LOCAL_BYTES_MAX:
            raise WireError(f"a message of {size} bytes, at most {LOCAL_BYTES_MAX}")
        message = json.loads(receive(connection, size))
        if not isinstance(message, dict):
            raise WireError("a message is an object")
    except BaseException as error:
        for each in descriptors:
            os.close(each)
        if isinstance(error, ValueError) and not isinstance(error, WireError):
            raise WireError("a message is JSON") from None
        raise
    return message, descriptors


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
