"""How much memory streaming takes, and the tile size and ring depth that fit into a budget. Pure."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_ELEMENT = 4
HEADER_BYTES = 16384
"""What describes a step in a slot, beside its gradients (`liver_core.streaming.header`)."""
TEMPORARIES = 4
"""Tile-sized fp32 temporaries of a replayed step: the clipped product, and up to three inside a foreach optimizer."""

TILE_ELEMENTS_LEAST = 1 << 16
TILE_ELEMENTS_MOST = 1 << 24
TILE_ELEMENTS_IN_HOST_MEMORY = 1 << 20
"""A tile of a few MB is read from there in milliseconds, so a step seldom happens during a read. A GPU reads the
longest as fast, and each tile costs it a wait."""
DEPTH_LEAST = 2
"""With one slot a gradient could be read only until the next step's is published, and never while it is."""
DEPTH_IN_HOST_MEMORY = 4
"""More slots let a reader be late by more steps."""


class BudgetRefused(MemoryError):
    """Streaming does not fit; the text says what is needed and what there is."""


@dataclass(frozen=True, slots=True)
class StreamingSizes:
    """`tile_elements`: longest range of a tile and of a replayed window. `depth`: slots of this rank's ring, 0 when it
    is no source. `bytes`: what both take together at most."""

    tile_elements: int
    depth: int
    bytes: int


def ring_bytes(gradient_bytes: int, depth: int) -> int:
    """Bytes of a source's counters, slots, headers and gradients. `gradient_bytes`: of one step on this rank."""
    return 8 + depth * (8 + HEADER_BYTES + gradient_bytes)


def replay_bytes(tile_elements: int, staged_kinds: int = 0) -> int:
    """Bytes that one replayed window takes on the device; tiles themselves land in place. `staged_kinds`: kinds of
    regions of which the window is copied first, since they lie in host memory or are not fp32."""
    return tile_elements * BYTES_PER_ELEMENT * (TEMPORARIES + staged_kinds)


def derive(
    extra_bytes_max: int | None,
    *,
    taken_bytes: int,
    gradient_bytes: int,
    target_numel: int,
    depth_wanted: int = 4,
    staged_kinds: int = 0,
) -> StreamingSizes:
    """The sizes under `extra_bytes_max` bytes of which `taken_bytes` are spoken for (the next world's own memory).

    gradient_bytes: of one step of this rank as a source. target_numel: elements of its region as a target. Both are 0
    where it is none. staged_kinds: as `replay_bytes` has it.
    The least tile comes first, then slots up to `depth_wanted`, then a larger tile. None is no limit. Raises
    BudgetRefused when the least tile and `DEPTH_LEAST` slots do not fit, ValueError for a wanted depth below that.
    """
    if depth_wanted < DEPTH_LEAST:
        raise ValueError(f"depth_wanted is {depth_wanted}, at least {DEPTH_LEAST}")
    least, most = min(TILE_ELEMENTS_LEAST, target_numel), min(TILE_ELEMENTS_MOST, target_numel)
    depth_least, depth_most = (DEPTH_LEAST, depth_wanted) if gradient_bytes else (0, 0)
    if extra_bytes_max is None:
        return _sizes(most, depth_most, gradient_bytes, staged_kinds)
    left = extra_bytes_max - taken_bytes
    smallest = _sizes(least, depth_least, gradient_bytes, staged_kinds)
    if smallest.bytes > left:
        raise BudgetRefused(
            f"extra_bytes_max: streaming needs {smallest.bytes} bytes ({depth_least} slots of {gradient_bytes} bytes, "
            f"tiles of {least} elements), of {extra_bytes_max} bytes {max(left, 0)} are left"
        )
    depth = max(
        depth
        for depth in range(depth_least, depth_most + 1)
        if _sizes(least, depth, gradient_bytes, staged_kinds).bytes <= left
    )
    beside = left - _sizes(0, depth, gradient_bytes, staged_kinds).bytes
    return _sizes(max(least, min(most, beside // replay_bytes(1, staged_kinds))), depth, gradient_bytes, staged_kinds)


def _sizes(tile_elements: int, depth: int, gradient_bytes: int, staged_kinds: int) -> StreamingSizes:
    ring = ring_bytes(gradient_bytes, depth) if depth else 0
    return StreamingSizes(tile_elements, depth, ring + replay_bytes(tile_elements, staged_kinds))
