"""Reads of state that its owner goes on changing: counter, tile, counter, each complete before the next is posted.

The seam for streaming. The owner makes its counter odd before it changes anything and even after; the reader believes
a tile only between two equal even counters. Not here: retries, rings, replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from liver_core.transport.protocol import Phase, Read, ReadReport, Transport, TransportError


@dataclass(frozen=True, slots=True)
class VersionedRead:
    """`version` is the even counter that held before and after; None means torn: the tile must be read again."""

    version: int | None
    before: int
    after: int
    report: ReadReport


def read_versioned(
    transport: Transport, tile: Sequence[Read], *, counter: Read, landing: torch.Tensor, deadline: float
) -> VersionedRead:
    """Read `tile` at one version of its owner.

    `counter` reads one int64 into the element of `landing` that its run names; `landing` is a registered target, one
    element for each source. All reads of `tile` must be from the counter's peer. Raises TransportError on a transport
    that is not one-sided: there, a tile is what the owner's thread copied at some moment between the two counters.
    """
    if not transport.one_sided:
        raise TransportError(Phase.READ, "versioned reads need a one-sided transport", peer=counter.peer)
    if {read.peer for read in tile} - {counter.peer}:
        raise TransportError(Phase.READ, "a versioned tile comes from one peer", peer=counter.peer, kind=counter.kind)
    slot = counter.runs[0].target_offset
    transport.read([counter], deadline)
    before = int(landing[slot])
    report = transport.read(tile, deadline)
    transport.read([counter], deadline)
    after = int(landing[slot])
    whole = before == after and before % 2 == 0
    return VersionedRead(before if whole else None, before, after, report)
