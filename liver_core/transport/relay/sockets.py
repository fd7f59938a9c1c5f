"""Blocking exchanges over sockets, each with an end: whole messages, both sides of the handshake, local messages."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
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
from liver_core.transport.relay.rank_user import RankUser

HANDSHAKE_S = 5.0
SILENCE_MS = 10_000
"""So long may sent bytes stay unacknowledged, and a connection that is used silent, before it counts as cut."""
LOCAL_BYTES_MAX = 2 << 20
"""Some 50,000 pieces of memory."""
_CREDENTIALS = struct.Struct("3i")
_LOCAL = struct.Struct("<I")
_parsing = threading.Lock()


def receive(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Exactly so many bytes, by `deadline` (time.monotonic()) where there is one. Raises ConnectionError at the end of
    the connection, OSError otherwise."""
    found = bytearray(size)
    view = memoryview(found)
    while len(view):
        if deadline is not None:
            connection.settimeout(_left(deadline))
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the other side has closed the connection")
        view = view[got:]
    return bytes(found)


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
    """No delay, and an end for a connection whose other side has fallen silent."""
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
        connection.sendall(proof(keys, nonce, receive(connection, CHALLENGE_BYTES, deadline)))
        if receive(connection, len(WELCOME), deadline) != WELCOME:
            raise WireError("the relay does not let this reader in")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def admit(connection: socket.socket, keys: Sequence[bytes]) -> None:
    """The relay's side of `dial`. Raises OSError or WireError for who is not let in."""
    deadline = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    prepare(connection)
    theirs, nonce = receive(connection, HELLO_BYTES, deadline), os.urandom(NONCE_BYTES)
    answer, key = challenge(keys, theirs, nonce)
    connection.sendall(answer)
    if key is None:
        raise WireError("a reader with another key")
    if not is_proof(key, theirs, nonce, receive(connection, MAC_BYTES, deadline)):
        raise WireError("a reader that does not hold the key")
    connection.sendall(WELCOME)
    connection.settimeout(None)


def peer_process(connection: socket.socket) -> tuple[int, RankUser]:
    """Process and user at the other end of a unix socket, as the kernel says. 0: a process that has no number here."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return pid, RankUser(uid, gid)


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has not closed it, or reset it."""
    looked = select.poll()
    looked.register(connection, select.POLLRDHUP)
    return not looked.poll(0)


def hang_up(connection: socket.socket) -> None:
    """Close it for all processes that have it, such as workers that a rank has forked since."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


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
        return _parsed(receive(connection, size)), descriptors
    except BaseException:
        for each in descriptors:
            os.close(each)
        raise


def _parsed(data: bytes) -> dict[str, Any]:
    """One at a time: what a message becomes takes many times its bytes. Raises WireError."""
    try:
        with _parsing:
            message = json.loads(data)
    except (ValueError, RecursionError):
        raise WireError("a message is JSON") from None
    if not isinstance(message, dict):
        raise WireError("a message is an object")
    return message


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
