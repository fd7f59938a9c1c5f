"""How much a survivor grows while the next world is built beside the one it trains in, as the kernel counts it.

Resident bytes are taken at the same point of a step each time, and preparation is held where a figure is wanted: what
a step needs for a moment would otherwise drown what is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster

STEPS = 2
POINTS = ("bring_up_groups", "build_model", "lay_out_state")


@dataclass(frozen=True)
class Growth:
    """Bytes a survivor grew by in each part of a preparation, and the extra bytes that it reported itself."""

    endpoint: int
    groups: int
    build: int
    memory: int
    reported: int


def measured_handoff(cluster: Cluster, layout: str, nodes: Iterable[str]) -> tuple[Any, dict[str, Growth]]:
    """Hand over as `Cluster.handoff` does; also the growth of each survivor by node."""
    assert cluster.roster is not None
    nodes = tuple(nodes)
    survivors = [member for member in cluster.roster.members if member.node_id in nodes]
    seen = [resident(cluster, survivors)]
    for member in survivors:
        cluster.ranks[member].events[:] = [event for event in cluster.ranks[member].events if event[0] != "held"]
        for point in POINTS:
            cluster.arm(member, point, "hold")
    request = cluster.open(layout, nodes)
    for point in POINTS:
        for member in survivors:
            cluster.await_passage(member, point, 60)
        seen.append(resident(cluster, survivors))
        cluster.command(survivors, "release")
    cluster.await_stage(cluster.members(request), request, "prepared", 60)
    seen.append(resident(cluster, survivors))
    cluster.complete(request)
    growth = {}
    for member in survivors:
        said = cluster.stages(member, request.handoff_id)[-1][2]
        parts = [after - before for before, after in itertools.pairwise(row[member] for row in seen)]
        growth[member.node_id] = Growth(*parts, reported=int(said["extra_bytes_peak"]))
    return request, growth


def resident(cluster: Cluster, members: Sequence[Member]) -> dict[Member, int]:
    """Least resident bytes of the next few steps of some ranks."""
    seen = {member: len(cluster.ranks[member].events) for member in members}

    def said(member: Member) -> list[int]:
        return [event[2] for event in cluster.ranks[member].events[seen[member] :] if event[0] == "resident"]

    def enough() -> bool:
        return all(len(said(member)) >= STEPS for member in members)

    cluster.wait_for(enough, 60, f"{STEPS} steps of {members}")
    return {member: min(said(member)) for member in members}
