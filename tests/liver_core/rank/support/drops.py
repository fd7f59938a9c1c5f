"""A handoff that drops the step under way: from its order to the drop, nothing but parts of one step pass."""

from __future__ import annotations

from typing import Any

from liver_core.handoff.messages import Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster


def hold_at(cluster: Cluster, member: Member, part: int) -> None:
    """Wait until a rank has done so many parts of a step, and keep it there, and with it its world."""
    held = ("held", f"part {part}")
    events = cluster.ranks[member].events
    while held in events:
        events.remove(held)
    cluster.arm(member, f"part {part}", "hold")
    cluster.await_passage(member, f"part {part}")


def prepare_within_a_step(cluster: Cluster, layout: str, nodes: str) -> Any:
    """Order a handoff after the first part of a step; the world is held after its third when all are prepared."""
    assert cluster.roster is not None
    first = cluster.roster.members[0]
    hold_at(cluster, first, 1)
    request = cluster.open(layout, nodes, rung=Rung.DROP_STEP)
    cluster.await_stage(cluster.members(request), request, "streaming", 40)
    cluster.command([first], "release")
    # Sources publish from the end of the second part on.
    hold_at(cluster, first, 3)
    cluster.await_stage(cluster.members(request), request, "prepared", 40)
    return request


def permit_held(cluster: Cluster, request: Any) -> None:
    """Give permission while the first source rank is held between two parts, then let it go on.

    Others are in the collective there and have shown nothing: the step is dropped at the next place at the latest.
    """
    members = cluster.members(request)
    cluster.command(members, "permit", request.handoff_id, request.plan_revision)
    cluster.await_stage(members, request, "ready", 20)
    cluster.command([request.source.members[0]], "release")
