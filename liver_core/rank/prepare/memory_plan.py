"""The memory of a handoff on one rank: plan it before anything is built, and move in what waited on the host."""

from __future__ import annotations

import time

import torch

from liver_core.handoff.messages import Order
from liver_core.layout import Manifest
from liver_core.layout.shards import region_numel
from liver_core.memory.memory_budget import DEPTH_LEAST, ring_bytes
from liver_core.memory.memory_placement import (
    GRAD,
    MemoryPlacement,
    Room,
    areas,
    cast_bytes,
    least_streaming,
    place,
    world_bytes,
)
from liver_core.memory.overheads import default_budget
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.memory_account import MemoryAccount
from liver_core.rank.next_world import NextWorld
from liver_core.state.host_memory import move_in
from liver_core.state.live_state import LiveState, free


def plan_memory(
    request: Order,
    manifest: Manifest,
    target_rank: int,
    present: LiveState | None,
    account: MemoryAccount,
) -> MemoryPlacement:
    """Where the parts of this rank's next world wait. `present`: the rank's state in the world in which it trains, None
    for a newcomer. Raises PlacementRefused with numbers.

    Without a limit a GPU says how much it has. With a limit, and where host memory is
    allowed, the budget of a newcomer's device grows by one world: it does not hold one yet.
    """
    assert request.source is not None
    source, target = request.source.layout, request.target.layout
    if account.device_bytes_max is None:
        account.device_bytes_max = _free_for_a_handoff(target.world_size, 0 if present is None else present.kept_bytes)
    elif account.host_bytes_max and present is None:
        account.device_bytes_max += world_bytes(manifest, source)
    stage = target.coordinates(target_rank).pp
    cast = cast_bytes(manifest, target, stage)
    if present is not None:
        cast -= cast_bytes(manifest, source, source.coordinates(present.rank).pp)
    ring = 0 if present is None else ring_bytes(present.regions[GRAD].bytes, DEPTH_LEAST)
    room = Room(
        account.device_bytes_max,
        account.host_bytes_max,
        held_bytes=0 if present is None else present.device_bytes,
        stream=least_streaming(ring, region_numel(manifest, target, target_rank)) if request.streams else None,
        cast_bytes=max(0, cast),
    )
    return place(areas(manifest, target, stage), room, target_rank)


def _free_for_a_handoff(ranks: int, kept_bytes: int) -> int | None:
    """What this rank's GPU has room for; None, which is no limit, without one. `kept_bytes`: as LiveState has it. What
    torch keeps beside that is what steps need at their peak."""
    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    kept_bytes = min(kept_bytes, torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return default_budget(free_bytes + kept_bytes, total_bytes, ranks)


def take_place(following: NextWorld, old: ActiveWorld | None) -> None:
    """After GO: move what waited in host memory to the device, in place of the present world.

    First free the handoff's other memory, then the present world, then allocate the next world. So the device never
    holds more than before or after the cutover. Nothing reads the present world any more: every target has voted that
    it holds all it needs. But if the next world is lost before its first step, the present world can no longer be the
    source of another handoff. Does nothing if nothing waits.
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
