"""What follows for a job from what its nodes report of their ranks: who failed, who goes on, who is not heard. Pure.

The nodes may be rows of the database, or those of a simulated service.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from liver_core.handoff import FailedPart, RankStage
from liver_core.layout import Member, ParallelLayout, Roster
from service.jobs.causes import stopped_among
from service.jobs.crashes import RankError
from service.jobs.stalls import rank_at
from service.jobs.view import Leaving, RankAt
from service.nodes.tables import NodeState


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node as the service knows it. `ranks`: each as its agent reported it last."""

    node_id: str
    state: NodeState
    last_seen_at: datetime
    ranks: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ActiveWorld:
    """The world that a job has; no generation where it has none."""

    job_id: str
    generation: int | None

    def has(self, rank: Mapping[str, Any]) -> bool:
        """Whether a reported rank is of this world."""
        return rank["job_id"] == self.job_id and rank["generation"] == self.generation


def in_state(nodes: Iterable[NodeSeen], members: Collection[str], state: NodeState) -> tuple[str, ...]:
    """The members in this state."""
    return tuple(node.node_id for node in nodes if node.node_id in members and node.state == state)


def unheard(nodes: Iterable[NodeSeen], since: datetime) -> tuple[str, ...]:
    """Nodes that count as ready, and have not reported since then."""
    return tuple(node.node_id for node in nodes if node.state == NodeState.READY and node.last_seen_at < since)


def unconfirmed(nodes: Iterable[NodeSeen], lost_at: datetime | None, heard_since: datetime) -> tuple[str, ...]:
    """Nodes not heard since the loss of the job's world was reported, whose report is not overdue either."""
    if lost_at is None:
        return ()
    late = (node for node in nodes if node.state == NodeState.READY and heard_since <= node.last_seen_at < lost_at)
    return tuple(node.node_id for node in late)


def leaving_of(noticed: Iterable[Leaving], members: Collection[str]) -> tuple[Leaving, ...]:
    """The members that will go, each by the earliest of its deadlines. `noticed`: notices that move jobs."""
    found: dict[str, Leaving] = {}
    for item in noticed:
        if item.node_id in members:
            old = found.get(item.node_id, item)
            deadlines = [at for at in (old.deadline_at, item.deadline_at) if at is not None]
            found[item.node_id] = Leaving(item.node_id, old.noticed_at, min(deadlines, default=None))
    return tuple(found[node_id] for node_id in sorted(found))


def errors_of(nodes: Iterable[NodeSeen], world: ActiveWorld) -> tuple[RankError, ...]:
    """One for each rank of this world that cannot continue."""
    failed = (RankStage.BROKEN, RankStage.FAILED)
    return tuple(
        RankError.of(node.node_id, rank)
        for node in nodes
        for rank in node.ranks
        if world.has(rank) and rank["stage"] in failed
    )


def clues_of(nodes: Iterable[NodeSeen], world: ActiveWorld) -> tuple[RankError, ...]:
    """The same of a next world that is past its boundary. What its ranks say of its store is left to the handoff, which
    knows where that is."""
    return tuple(error for error in errors_of(nodes, world) if error.cause.what is not FailedPart.STORE)


def stopped(nodes: Iterable[NodeSeen], world: ActiveWorld) -> tuple[tuple[str, int], ...]:
    """Node and number of each rank that has no error, and whose process is stopped by the word of its agent."""
    return stopped_among([(node.node_id, rank) for node in nodes for rank in node.ranks if is_at_work(rank, world)])


def at_work(nodes: Iterable[NodeSeen], world: ActiveWorld) -> tuple[RankAt, ...]:
    """Where each of those ranks is."""
    return tuple(rank_at(node.node_id, rank) for node in nodes for rank in node.ranks if is_at_work(rank, world))


def is_at_work(rank: Mapping[str, Any], world: ActiveWorld) -> bool:
    """Whether the rank is of the active generation, and has not said that it is over."""
    over = (RankStage.BROKEN, RankStage.FAILED, RankStage.FINISHED, RankStage.LEFT)
    return world.has(rank) and rank["stage"] not in over


def ahead_of(
    nodes: Sequence[NodeSeen], world: ActiveWorld, members: Collection[str], heard_since: datetime
) -> tuple[int | None, bool]:
    """The highest generation above the active one in which a living node's rank already trains, and whether a member of
    the active one says so. What only others say counts for nothing while a member says that its own rank lives."""
    active, trains = world.generation or 0, (RankStage.TRAINING, RankStage.ACTIVE)
    newest = {True: active, False: active}
    for node in nodes:
        is_member = node.node_id in members
        for rank in node.ranks:
            if node.state != NodeState.GONE and rank["job_id"] == world.job_id and rank["stage"] in trains:
                newest[is_member] = max(newest[is_member], rank["generation"])
    if not active or newest[True] > active:
        return (newest[True] if active else None), True
    heard = (node for node in nodes if node.node_id in members and node.last_seen_at >= heard_since)
    if newest[False] == active or any(is_at_work(rank, world) for node in heard for rank in node.ranks):
        return None, True
    return newest[False], False


def crosses(nodes: Iterable[NodeSeen], job_id: str, worlds: Collection[int | None]) -> bool:
    """Whether a rank of one of these worlds says that it is past the boundary of a handoff, and not yet that it is
    over. Its lead may not have told of that, or tell no more."""
    ranks = (rank for node in nodes for rank in node.ranks if rank["job_id"] == job_id)
    return any(rank["stage"] == RankStage.CUTTING_OVER and rank["generation"] in worlds for rank in ranks)


def world_of(nodes: Iterable[NodeSeen], job_id: str, generation: int) -> Roster | None:
    """The world of this generation, by what its own ranks say, if each of them makes steps in it. Whoever led the
    handoff may have told of another target before it was lost."""
    known, stages = ActiveWorld(job_id, generation), (RankStage.TRAINING, RankStage.ACTIVE)
    found = [
        (rank["rank"], Member(node.node_id, rank["slot"]), rank.get("layout", ""))
        for node in nodes
        for rank in node.ranks
        if known.has(rank) and rank["stage"] in stages
    ]
    try:
        (layout,) = {ParallelLayout.parse(text) for _, _, text in found}
        members = tuple(member for _, member, _ in sorted(found))
        is_whole = [number for number, _, _ in sorted(found)] == list(range(layout.world_size))
        return Roster(job_id, generation, layout, members) if is_whole else None
    except ValueError:
        return None  # None, or several, or what is no layout.


def ranks_left(living: Iterable[NodeSeen], job_id: str) -> int:
    """Rank processes of this job that nodes which are not gone still report."""
    over = (RankStage.LEFT, RankStage.FINISHED, RankStage.FAILED, RankStage.ABORTED)
    ranks = (rank for node in living for rank in node.ranks)
    return sum(1 for rank in ranks if rank["job_id"] == job_id and rank["stage"] not in over)


def lead_order(members: Iterable[str], *, ready: Collection[str], going: Collection[str]) -> tuple[str, ...]:
    """The order in which nodes lead: ready members that stay, in rank order; then ready members that will go."""
    return tuple(sorted((node for node in members if node in ready), key=lambda node: node in going))
