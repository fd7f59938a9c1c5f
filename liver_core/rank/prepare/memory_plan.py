"""The memory of a handoff on one rank: planned before anything is built, and what waited on the host moved in."""

from __future__ import annotations

import time

from liver_core.handoff.messages import Order
from liver_core.layout import Manifest
from liver_core.layout.shards import region_numel
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.next_world import NextWorld
from liver_core.state.host_memory import move_in
from liver_core.state.live_state import LiveState, free
from liver_core.streaming.memory_budget import DEPTH_LEAST, ring_bytes
from liver_core.streaming.memory_placement import Placement, Room, areas, least_streaming, place, world_bytes


def plan_memory(
    request: Order,
    manifest: Manifest,
    target_rank: int,
    held: LiveState | None,
    *,
    extra_bytes_max: int | None,
    host_bytes_max: int,
) -> tuple[Placement, int | None]:
    """Where the parts of this rank's next world wait, and the budget of its device. `held`: its state in the present
    world. Raises PlacementRefused with numbers.

    Where host memory is allowed, the device of a newcomer, which has no present world, has room for one besides.
    """
    assert request.source is not None
    source, target = request.source.layout, request.target.layout
    if extra_bytes_max is not None and host_bytes_max and held is None:
        extra_bytes_max += world_bytes(manifest, source)
    ring = 0 if held is None else ring_bytes(held.shards.region_numel, DEPTH_LEAST)
    room = Room(
        extra_bytes_max,
        host_bytes_max,
        held_bytes=0 if held is None else held.device_bytes,
        stream=least_streaming(ring, region_numel(manifest, target, target_rank)) if request.streams else None,
    )
    return place(areas(manifest, target, target.coordinates(target_rank).pp), room, target_rank), extra_bytes_max


def take_place(following: NextWorld, old: ActiveWorld | None) -> None:
    """After GO: what waited in host memory moves to the device, in the place of the present world.

    Everything that the handoff took beside the next world goes first, then the present world, then the next one comes:
    so the device never holds more than before the cutover or after it. Nothing reads the present world any more, since
    every target has voted that it holds all it needs; but it is no source for another handoff now, should this
    world be lost before its first step. Does nothing where nothing waits.
    """
    live, account = following.live, following.account
    assert live is not None
    if not live.hollow:
        return
    started = time.monotonic()
    following.end_streams()
    if following.transport is not None:
        following.transport.close()
    account.take(-following.free_streams())
    if old is not None:
        account.take(-free(old.live))
    move_in(live, account.take)
    following.measures["swap_in_s"] = time.monotonic() - started
