"""What a node may say of a job that it has a part in: of its own ranks, of worlds that it belongs to. Pure.

Which jobs a node may speak of at all follows from the grants that the service wrote (`service.jobs.grants`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from agent.protocol.sync import HandoffMirror
from service.db.roster_rows import stored_roster

HOLDS = frozenset({"steps", "logs", "checkpoints", "finished", "metrics"})
"""What is said once, and must not be lost because the handoff that explains it is reported later."""

PASSED_ON = frozenset({"checkpoints", "steps", "metrics"})
"""What nodes of an earlier world tell those of the present one while the service is away."""

Seats = Mapping[str, frozenset[tuple[int, int]]]
"""The ranks of each node, as (rank, slot)."""


def seats_of(roster: Mapping[str, Any]) -> Seats:
    """Who holds which rank, from a roster or a placement as it is stored."""
    found: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for rank, member in enumerate(roster["members"]):
        found[member["node_id"]].add((rank, member["slot"]))
    return {node_id: frozenset(held) for node_id, held in found.items()}


@dataclass(frozen=True, slots=True)
class KnownWorld:
    """One generation of a job. `is_settled`: it has been active, so that its plan is not amended any more.
    `store_node`: where its store is, as far as that is known."""

    seats: Seats
    is_settled: bool
    store_node: str | None = None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the service knows of a job. `world`: of a generation, None for one that it does not know. `is_member`:
    whether a node gets the job's orders, also as a target or a spare."""

    active: int | None
    world: Callable[[int], KnownWorld | None]
    checkpoints: str | None
    is_member: Callable[[str], bool]


class Treatment(StrEnum):
    """What to do with a part of a report."""

    TAKE = "take"
    HOLD = "hold"
    REFUSE = "refuse"


class Ruling(NamedTuple):
    """`reason`: why it is refused or held."""

    verdict: Treatment
    reason: str = ""


TAKE = Ruling(Treatment.TAKE)


def ruling(part: str, item: Any, node_id: str, job: JobFacts) -> Ruling:
    """Whether this node may say this of this job."""
    if part == "checkpoints" and (wrong := _checkpoint_rule(item.path, job)):
        return Ruling(Treatment.REFUSE, wrong)
    world = job.world(item.generation)
    if world is None:
        why = f"generation {item.generation} is not known here yet"
        return Ruling(Treatment.HOLD, why) if part in HOLDS else TAKE
    own = world.seats.get(node_id, frozenset())
    if not own:
        return _of_another(part, item, node_id, world, job)
    if part == "ranks" and world.is_settled and (item.rank, item.slot) not in own:
        return Ruling(Treatment.REFUSE, f"rank {item.rank} in slot {item.slot} is not one of node {node_id}'s")
    if part == "logs" and world.is_settled and item.rank not in {rank for rank, _ in own}:
        return Ruling(Treatment.REFUSE, f"rank {item.rank} is not one of node {node_id}'s")
    return TAKE


def _of_another(part: str, item: Any, node_id: str, world: KnownWorld, job: JobFacts) -> Ruling:
    """Of a world that the node has no rank in: ranks that are given up before they begin, the store that it started for
    it as a node of the world before, and what nodes that have gone passed on to those that came. The world that they
    came to may be told later."""
    wrong = Ruling(Treatment.REFUSE, f"node {node_id} holds no rank of generation {item.generation}")
    if part == "ranks":
        return wrong if world.is_settled else TAKE
    if part == "stores":
        return TAKE if node_id == world.store_node else wrong
    if part not in PASSED_ON or not (part == "checkpoints" or world.is_settled):
        return wrong
    active = job.world(job.active) if job.active else None
    if active is not None and node_id in active.seats:
        return TAKE
    return Ruling(Treatment.HOLD, f"no world of node {node_id} is known here yet") if job.is_member(node_id) else wrong


def _checkpoint_rule(path: str, job: JobFacts) -> str:
    if job.checkpoints is None:
        return "the job file names no place for checkpoints"
    found = PurePosixPath(path)
    is_below = PurePosixPath(job.checkpoints) in found.parents and ".." not in found.parts
    return "" if is_below else f"path must be below {job.checkpoints}, the place that the job file names"


def mirror_ruling(
    mirror: HandoffMirror, node_id: str, *, granted: Set[str], parent: KnownWorld | None, held_by: Set[str]
) -> Ruling:
    """Whether a node may report this handoff. `granted`: the nodes that have a part in the job. `parent`: the world it
    starts from, if that is known. `held_by`: nodes of worlds that are over by this report, and that say otherwise;
    asked where the reporter is no witness: not in the source itself, or nobody reported how that world came to be."""
    source = set(mirror.source.node_ids()) if mirror.source is not None else set()
    nodes = source | set(mirror.target.node_ids())
    if node_id not in nodes:
        return Ruling(Treatment.REFUSE, f"node {node_id} is neither in its source nor in its target")
    if mirror.proposer not in (*nodes, "service"):
        return Ruling(Treatment.REFUSE, f"its proposer {mirror.proposer} is neither in its source nor in its target")
    if strangers := sorted(nodes - granted):
        return Ruling(Treatment.REFUSE, f"node {strangers[0]} has no part in this job")
    known = parent.seats if parent is not None and parent.is_settled else None
    if known is not None and mirror.source is not None and seats_of(stored_roster(mirror.source)) != known:
        return Ruling(Treatment.REFUSE, f"its source is not the world of generation {mirror.parent}")
    if held_by:
        return Ruling(Treatment.HOLD, f"node {min(held_by)} still runs the world before it, and says nothing of it")
    return TAKE
