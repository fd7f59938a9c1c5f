"""What a wire between two machines does, measured before a handoff needs it: how a peer is read, how fast, how soon.

Both ends are endpoints as a rank makes them, in processes of their own: no rank takes part.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

from liver_core.reshard.plan import CopyRuns
from liver_core.transport.mixed import MixedTransport, Wire
from liver_core.transport.protocol import Read, Transport

REGION_BYTES = 32 << 20
LATENCY_READS = 16
LATENCY_BYTES = 64
FIRST_BYTES, READ_S = 256 << 10, 1.0
"""Twice as many each time, until so long has passed: a slow wire is not kept busy for longer than a read more."""
_REGION = "state"
_PEER = 0


@dataclass(frozen=True, slots=True)
class WireSpeed:
    """`bytes_per_s`: of one reader that reads one source, 0 where nothing was left to be read after the first bytes.
    `latency_s`: of a read of 64 bytes, the median of 16."""

    wire: Wire
    bytes_per_s: float
    latency_s: float


def offer(endpoint: Transport) -> bytes:
    """Let others read 32 MiB of this endpoint; its address."""
    endpoint.register(sources={_REGION: torch.zeros(REGION_BYTES, dtype=torch.uint8)})
    address = endpoint.address()
    endpoint.start_progress()
    return address


def measure(endpoint: MixedTransport, address: bytes, deadline: float, *, bytes_max: int) -> WireSpeed:
    """Read the peer at `address` for a second, at most `bytes_max`. `deadline`: time.monotonic().

    Raises TransportError.
    """
    endpoint.register(targets={_REGION: torch.zeros(REGION_BYTES, dtype=torch.uint8)})
    endpoint.start_progress()
    endpoint.connect(_PEER, address, deadline)
    endpoint.calm()
    latencies = [endpoint.read([_read(LATENCY_BYTES)], deadline).seconds for _ in range(LATENCY_READS)]
    size, left, moved, started, seconds = FIRST_BYTES, bytes_max, 0, math.inf, 0.0
    while size <= left and seconds < READ_S:
        got = endpoint.read([_read(size)], deadline).bytes
        now, left = time.monotonic(), left - got
        if started < math.inf:
            moved, seconds = moved + got, now - started
        else:
            started = now  # A connection begins slowly: its first bytes do not count.
        size = min(2 * size, REGION_BYTES)
    return WireSpeed(endpoint.wire(_PEER), moved / seconds if moved else 0.0, statistics.median(latencies))


def _read(size: int) -> Read:
    return Read(_PEER, _REGION, (CopyRuns(0, 0, size),))
