"""The least memory that a handoff can do with: everything that can waits in host memory, one tile passes the device."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from liver_core.layout import Manifest, Member, ParallelLayout, from_json
from liver_core.layout.shards import region_numel
from liver_core.memory.memory_budget import DEPTH_LEAST, TILE_ELEMENTS_LEAST, replay_bytes, ring_bytes
from liver_core.memory.memory_placement import GRAD, areas, cast_bytes
from tests.cluster.rank_cluster import Cluster, RankSetup


def manifest_of(setup: RankSetup) -> Manifest:
    """The manifest of a job, from a world of one rank that does one step."""
    with Cluster(replace(setup, last_step=1, record=False)) as cluster:
        cluster.launch("TP1", "a")
        results = cluster.finish()
        return from_json(Manifest, results[Member("a", 0)]["manifest"])


def tight(manifest: Manifest, source: tuple[str, int], target: tuple[str, int], *, streams: bool) -> tuple[int, int]:
    """Bytes on the device that a survivor needs at least, and then in host memory. (layout, rank) it has and will have.

    In a stream all waits in host memory, and a window of everything passes the device. In stop-and-copy the device has
    what the next world takes more than the present one, and may hold what fits into that.
    """
    (held, held_rank), (wanted, rank) = ((ParallelLayout.parse(text), rank) for text, rank in (source, target))
    parts = areas(manifest, wanted, wanted.coordinates(rank).pp)
    before = areas(manifest, held, held.coordinates(held_rank).pp)
    after = sum(area.device_bytes for area in parts) - sum(area.device_bytes for area in before)
    stages = wanted.coordinates(rank).pp, held.coordinates(held_rank).pp
    after += max(0, cast_bytes(manifest, wanted, stages[0]) - cast_bytes(manifest, held, stages[1]))
    if streams:
        tile = min(TILE_ELEMENTS_LEAST, region_numel(manifest, wanted, rank))
        gradients = next(area.host_bytes for area in before if area.name == GRAD)
        ring = ring_bytes(gradients, DEPTH_LEAST)
        staged = ring + replay_bytes(tile, sum(len(area.kinds) for area in parts))
        return max(after, staged), sum(area.host_bytes for area in parts)
    device = max(after, 1)
    some = [chosen for count in range(len(parts) + 1) for chosen in combinations(parts, count)]
    on_device = [chosen for chosen in some if sum(area.device_bytes for area in chosen) <= device]
    spared = max(sum(area.host_bytes for area in chosen) for chosen in on_device)
    return device, sum(area.host_bytes for area in parts) - spared
