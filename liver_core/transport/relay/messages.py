"""What a relay and its readers say to each other over TCP: handshake, requests, answers. Pure: bytes in, bytes out.

Handshake: both sides prove that they hold the handoff's key (HMAC-SHA256 over both nonces), and neither sends it.
Then the reader asks, any number of times without waiting, and is answered in this order. Integers: little-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from liver_core.transport.protocol import Guard

MAGIC = b"LIVER1"
NONCE_BYTES = MAC_BYTES = 32
KEYS_MAX = 2
"""The key of the job and, while it changes, the one before."""
KEY_ID_BYTES = 8
HELLO_BYTES = len(MAGIC) + NONCE_BYTES + KEYS_MAX * KEY_ID_BYTES
CHALLENGE_BYTES = 1 + NONCE_BYTES + MAC_BYTES
WELCOME = b"\x01"
NO_KEY = 0xFF

NAME_BYTES_MAX = 512
RUNS_MAX = 1 << 14
BYTES_MAX = 2 << 20
"""Of one answer. Two of them bound what a relay holds for one connection."""
TEXT_BYTES_MAX = 512

_REQUEST = struct.Struct("<IQHHHIqq")
_ANSWER = struct.Struct("<QBqI")
REQUEST_HEADER_BYTES, ANSWER_HEADER_BYTES = _REQUEST.size, _ANSWER.size
BODY_BYTES_MAX = 3 * NAME_BYTES_MAX + 16 * RUNS_MAX


class WireError(ValueError):
    """The other side does not speak this protocol, or breaks its limits. The connection is worth nothing any more."""


def handoff_key(peer_key: str, handoff_id: str) -> bytes:
    """32 bytes that all relays of one handoff share. It tells nothing of the job's peer key."""
    return hmac.digest(peer_key.encode(), f"stream relay of handoff {handoff_id}".encode(), "sha256")


def key_id(key: bytes) -> bytes:
    """Which key it is, for who holds it too."""
    return hashlib.sha256(b"id of " + key).digest()[:KEY_ID_BYTES]


def hello(keys: Sequence[bytes], nonce: bytes) -> bytes:
    """The reader's first message: its nonce and which keys it holds."""
    ids = b"".join(key_id(key) for key in keys[:KEYS_MAX])
    return MAGIC + nonce + ids.ljust(KEYS_MAX * KEY_ID_BYTES, b"\0")


def challenge(keys: Sequence[bytes], hello_bytes: bytes, nonce: bytes) -> tuple[bytes, bytes | None]:
    """The relay's answer to a hello, and the key that both hold; None if there is none. Raises WireError."""
    if len(hello_bytes) != HELLO_BYTES or not hello_bytes.startswith(MAGIC):
        raise WireError("not a reader of a stream relay")
    theirs, ids = hello_bytes[len(MAGIC) :][:NONCE_BYTES], hello_bytes[len(MAGIC) + NONCE_BYTES :]
    offered = [ids[at : at + KEY_ID_BYTES] for at in range(0, len(ids), KEY_ID_BYTES)]
    for key in keys:
        if key_id(key) in offered:
            return bytes([offered.index(key_id(key))]) + nonce + _mac(key, b"relay", theirs, nonce), key
    return bytes([NO_KEY]) + bytes(NONCE_BYTES + MAC_BYTES), None


def proof(keys: Sequence[bytes], nonce: bytes, challenge_bytes: bytes) -> bytes:
    """The reader's answer to a challenge. Raises WireError where the relay has not proved that it holds a key."""
    number, theirs, mac = challenge_bytes[0], challenge_bytes[1 : 1 + NONCE_BYTES], challenge_bytes[1 + NONCE_BYTES :]
    if number >= len(keys):
        raise WireError("the relay has another key: it is of another handoff, or the job's peer key has changed")
    key = keys[number]
    if not hmac.compare_digest(mac, _mac(key, b"relay", nonce, theirs)):
        raise WireError("the relay does not hold the handoff's key")
    return _mac(key, b"reader", nonce, theirs)


def is_proof(key: bytes, hello_bytes: bytes, nonce: bytes, proof_bytes: bytes) -> bool:
    """Whether a reader has proved that it holds `key`, to the relay that sent it `nonce`."""
    theirs = hello_bytes[len(MAGIC) :][:NONCE_BYTES]
    return hmac.compare_digest(proof_bytes, _mac(key, b"reader", theirs, nonce))


def _mac(key: bytes, side: bytes, readers: bytes, relays: bytes) -> bytes:
    return hmac.digest(key, side + readers + relays, "sha256")


@dataclass(frozen=True, slots=True)
class Request:
    """Runs of the region `kind` of the endpoint `source`. `table`: int64 (runs, 2) of offset and length, in bytes."""

    number: int
    source: str
    kind: str
    table: np.ndarray
    guard: Guard | None = None

    @property
    def bytes(self) -> int:
        return int(self.table[:, 1].sum())

    def encode(self) -> bytes:
        """For the relay, which refuses what `decode` refuses."""
        guard = self.guard or Guard("", 0, 0)
        names = [text.encode() for text in (self.source, self.kind, guard.kind)]
        body = b"".join(names) + np.ascontiguousarray(self.table, dtype="<i8").tobytes()
        lengths = (len(name) for name in names)
        return _REQUEST.pack(len(body), self.number, *lengths, len(self.table), guard.index, guard.value) + body

    @staticmethod
    def body_bytes(header: bytes) -> int:
        """How many bytes follow this header. Raises WireError for more than a request has."""
        size = int(_REQUEST.unpack(header)[0])
        if size > BODY_BYTES_MAX:
            raise WireError(f"a request of {size} bytes, at most {BODY_BYTES_MAX}")
        return size

    @staticmethod
    def decode(header: bytes, body: bytes) -> Request:
        """Raises WireError. Whether there are such regions and runs is for who has them to say."""
        size, number, source, kind, guard, runs, index, value = _REQUEST.unpack(header)
        names = source + kind + guard
        if len(body) != size or size != names + 16 * runs:
            raise WireError(f"a request of {len(body)} bytes with {names} bytes of names and {runs} runs")
        if max(source, kind, guard) > NAME_BYTES_MAX or not 1 <= runs <= RUNS_MAX:
            raise WireError(f"names have 0 to {NAME_BYTES_MAX} bytes, and there are 1 to {RUNS_MAX} runs")
        table = np.frombuffer(body, dtype="<i8", offset=names).reshape(runs, 2)
        lengths = table[:, 1]
        if table.min() < 0 or lengths.min() < 1 or lengths.max() > BYTES_MAX or lengths.sum() > BYTES_MAX:
            raise WireError(f"runs have an offset of 0 or more, and 1 to {BYTES_MAX} bytes together")
        try:
            texts = [body[at : at + length].decode() for at, length in _places(source, kind, guard)]
        except UnicodeDecodeError:
            raise WireError("names are not UTF-8") from None
        return Request(number, texts[0], texts[1], table, Guard(texts[2], index, value) if guard else None)


def _places(*lengths: int) -> list[tuple[int, int]]:
    return [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]


class Status(IntEnum):
    """whole: the bytes follow, and the guard held. moved: the guard did not hold, no bytes follow. refused: the relay
    has no such region or cannot read it; a text follows."""

    WHOLE = 0
    MOVED = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """To the request of this number. `value`: what the guard's counter was. `bytes`: how many follow."""

    number: int
    status: Status
    value: int
    bytes: int

    def encode(self) -> bytes:
        return _ANSWER.pack(self.number, self.status, self.value, self.bytes)

    @staticmethod
    def decode(header: bytes) -> Answer:
        """Raises WireError."""
        number, status, value, size = _ANSWER.unpack(header)
        if status not in tuple(Status) or size > (TEXT_BYTES_MAX if status == Status.REFUSED else BYTES_MAX):
            raise WireError(f"an answer of status {status} with {size} bytes")
        return Answer(number, Status(status), value, size)
