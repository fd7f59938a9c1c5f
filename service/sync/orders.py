"""Makes the orders of one job, from stored rows and nothing else. `service.sync.answers` makes answers of them."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Text, and_, cast, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from agent.protocol.jobfile import JobFile
from agent.protocol.notice_life import DRAIN, bars_ranks, key_of
from agent.protocol.sources import GenerationSource, SourceCheckpoint, SourceHandoff, SourceInit
from agent.protocol.sync import (
    PROBES_MAX,
    DesiredState,
    HandoffOrder,
    JobOrder,
    LayoutByCount,
    LayoutForCount,
    NoticeFact,
    StandingPlan,
)
from agent.protocol.values import HandoffCause
from liver_core.handoff import LaterCheckpoints, StoreAddress
from liver_core.layout import Member, Roster
from liver_core.layout.limits import NODES_MAX, fitting, listed
from service.db.base import among
from service.db.parsed import Parsed
from service.handoffs.queries import open_handoffs, placement_of
from service.handoffs.tables import HandoffRow
from service.jobs.queries import LIST_MAX, job_file_of, roster_of
from service.jobs.reported import lead_order
from service.jobs.tables import GenerationRow, JobRow, JobState, SourceKind
from service.nodes.tables import NodeState
from service.notices.queries import as_fact
from service.notices.rules import horizon, over_at
from service.problems import field_problems

PROBING_NODES = 3
ALL_PLANS_UP_TO_NODES = 64
"""In larger jobs a node gets only the plan for its own loss: all plans for all nodes would grow with the square."""

DESIRED = {
    JobState.PENDING: DesiredState.RUN,
    JobState.STARTING: DesiredState.RUN,
    JobState.RUNNING: DesiredState.RUN,
    JobState.SUSPENDING: DesiredState.SUSPENDED,
    JobState.SUSPENDED: DesiredState.SUSPENDED,
    JobState.STOPPING: DesiredState.STOP,
    JobState.STOPPED: DesiredState.STOP,
    JobState.FINISHED: DesiredState.STOP,
    JobState.FAILED: DesiredState.STOP,
}
"""What agents are to do with the ranks of a job in this state."""

# The plans as text: those of a thousand nodes have some megabytes, and are read only where they are others.
_JOBS = (
    select(JobRow, GenerationRow, cast(JobRow.standing_plans, Text), cast(JobRow.layouts_by_count, Text))
    .outerjoin(
        GenerationRow,
        and_(GenerationRow.job_id == JobRow.job_id, GenerationRow.generation == JobRow.active_generation),
    )
    .where(among(JobRow.job_id, "job_ids"))
    .execution_options(populate_existing=True)
)
# One row for each member of a job, and for each notice about it that may count: its newest row says all of it.
_MEMBERS = text(
    """
    SELECT members.job_id, nodes.node_id, nodes.peer_url, nodes.state, nodes.slots, notices.notice_id, notices.kind,
           notices.source, notices.deadline_at, notices.first_seen_at, notices.withdrawn_at, notices.raw,
           notices.event_id, notices.said_at, notices.told_in, notices.recorded_at
      FROM (SELECT job_id, node_id FROM job_members WHERE job_id = ANY(CAST(:job_ids AS text[]))
            UNION ALL SELECT * FROM unnest(CAST(:namers AS text[]), CAST(:named AS text[]))) AS members
      JOIN nodes ON nodes.node_id = members.node_id
      LEFT JOIN (notices JOIN leases ON leases.lease_id = notices.lease_id AND leases.ended_at IS NULL)
        ON notices.node_id = nodes.node_id
       AND (notices.deadline_at > :horizon OR notices.first_seen_at > :horizon
            OR (notices.source = :drain AND (notices.withdrawn_at IS NULL OR notices.withdrawn_at > :horizon)))
       AND NOT EXISTS (SELECT FROM notices AS newer WHERE newer.lease_id = notices.lease_id
                          AND newer.kind = notices.kind AND newer.source = notices.source
                          AND newer.event_id = notices.event_id AND newer.notice_id > notices.notice_id)
    """
)
_STANDING = TypeAdapter(tuple[StandingPlan, ...])
_CHOICES = TypeAdapter(tuple[LayoutForCount, ...])
_PLANS: Parsed[tuple[StandingPlan, ...]] = Parsed(_STANDING.validate_json, most=LIST_MAX)
_LAYOUTS: Parsed[LayoutByCount] = Parsed(
    lambda stored: LayoutByCount(choices=_CHOICES.validate_json(stored)), most=LIST_MAX
)


@dataclass(slots=True)
class Neighbour:
    """A node as the orders of its job describe it, with its notices: also withdrawn ones, so that whoever was told of
    them hears that they do not count any more. What is over is in no order; `changes_at`: when the first of them is."""

    node_id: str
    peer_url: str
    state: str
    slots: int
    notices: list[NoticeFact] = field(default_factory=list)
    changes_at: datetime | None = None


_Nodes = dict[str, Neighbour]


class _Stored(NamedTuple):
    job: JobRow
    active: GenerationRow | None
    plans: str
    layouts: str


@dataclass(frozen=True, slots=True)
class SharedOrder:
    """What all nodes of a job are told. `order` has every standing plan, and no probes: `own_part` is of one node.
    `ready`: the first few nodes that are heard, `silent`: those that are not. `changes_at`: when a notice in it is over
    next, which changes it while the rows stay; None: never."""

    order: JobOrder
    ready: tuple[str, ...]
    silent: tuple[str, ...]
    changes_at: datetime | None


@dataclass(frozen=True, slots=True)
class Unmade:
    """Why what is stored of a job makes no order."""

    because: str


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What only one node of a job is told."""

    standing_plans: tuple[StandingPlan, ...]
    probe: tuple[str, ...]


def shared_orders(
    session: Session, job_ids: Collection[str], *, lost_after_s: float, now: datetime
) -> dict[str, SharedOrder | Unmade]:
    """The orders of these jobs from their rows as they are now, with as many statements as for one. A job that does not
    exist has none; one whose rows make none has the reason, and the others have theirs. `lost_after_s`: when no member
    of a job is heard for so long, it may be started elsewhere."""
    if not job_ids:
        return {}
    found = {row[0].job_id: _Stored(*row) for row in session.execute(_JOBS, {"job_ids": sorted(job_ids)})}
    unmade: dict[str, Unmade] = {}
    rosters: dict[str, Roster] = {}
    for job_id, row in found.items():
        if row.active is not None:
            with _alone(job_id, unmade):
                rosters[job_id] = roster_of(row.active)
    nodes = _members(session, {"job_ids": sorted(found)}, now=now)
    unknown = [
        (job_id, node_id)
        for job_id, roster in rosters.items()
        for node_id in sorted(set(roster.node_ids()) - nodes[job_id].keys())
    ]
    if unknown:
        # Nodes of a roster that are no longer members of its job still get each other's addresses.
        namers, named = zip(*unknown, strict=True)
        for job_id, others in _members(session, {"namers": list(namers), "named": list(named)}, now=now).items():
            nodes[job_id] |= others
    handoffs = open_handoffs(session, found)
    made: dict[str, SharedOrder | Unmade] = {}
    for job_id, stored in found.items():
        if job_id not in unmade:
            parts = rosters.get(job_id), nodes[job_id], handoffs.get(job_id)
            with _alone(job_id, unmade):
                made[job_id] = _made(stored, *parts, lost_after_s=lost_after_s, now=now)
    return made | unmade


@contextmanager
def _alone(job_id: str, unmade: dict[str, Unmade]) -> Iterator[None]:
    """What is wrong with the rows of one job is noted, and keeps nobody from the orders of the others."""
    try:
        yield
    except SQLAlchemyError:
        raise
    except ValidationError as error:
        unmade[job_id] = Unmade(fitting(listed(f"{item.field}: {item.rule}" for item in field_problems(error))))
    except Exception as error:
        unmade[job_id] = Unmade(fitting(f"{type(error).__name__}: {error}"))


def _made(
    stored: _Stored,
    roster: Roster | None,
    nodes: _Nodes,
    handoff: HandoffRow | None,
    *,
    lost_after_s: float,
    now: datetime,
) -> SharedOrder:
    job, active = stored.job, stored.active
    spec = job_file_of(job)
    noticed = sorted((item for node in nodes.values() for item in node.notices), key=key_of)
    going = {item.node_id for item in noticed if bars_ranks(item, now)}
    order = JobOrder(
        job_id=job.job_id,
        spec=spec,
        peer_key=job.peer_key,
        peer_key_before=job.peer_key_before,
        peer_key_number=job.peer_key_number,
        desired=DESIRED[JobState(job.state)],
        suspends_utc=job.suspends_at,
        generation=active.generation if active else None,
        origin_id=UUID(str(active.origin_id)) if active else None,
        source=_source(active) if active else None,
        later=_later(job, active, spec) if active else None,
        roster=roster,
        next_generation=job.next_generation,
        peers={node_id: nodes[node_id].peer_url for node_id in sorted(nodes)},
        store_node=active.store_node if active else None,
        store=_store(active) if active else None,
        lead_order=lead_order(
            roster.node_ids() if roster else (),
            ready={name for name, node in nodes.items() if node.state == NodeState.READY},
            going=going,
        ),
        standing_plans=tuple(
            plan for plan in _PLANS.of(job.job_id, stored.plans) if plan.parent == job.active_generation
        ),
        layouts_by_count=_LAYOUTS.of(job.job_id, stored.layouts),
        spares=_spares([name for name in job.spares if name in nodes and name not in going], nodes, roster),
        handoff=_handoff_order(handoff) if handoff is not None and handoff.proposer == "service" else None,
        checkpoint_asked=job.checkpoints_asked if job.awaits_checkpoint else 0,
        saves_at_end=_may_end(job) and spec.checkpoint is not None,
        notices=tuple(noticed[:NODES_MAX]),
        lost_after_s=lost_after_s,
        steps_from_utc=active.steps_from_at if active else None,
        reason=job.reason[:2_000],
    )
    return SharedOrder(
        order,
        ready=tuple(sorted(name for name, node in nodes.items() if node.state == NodeState.READY)[:PROBING_NODES]),
        silent=tuple(sorted(name for name, node in nodes.items() if node.state == NodeState.SILENT)[:PROBES_MAX]),
        changes_at=min((node.changes_at for node in nodes.values() if node.changes_at is not None), default=None),
    )


def own_part(shared: SharedOrder, node_id: str) -> OwnPart:
    """What this node is told besides. The silent members, for the first few that are not: do their machines answer?"""
    plans, roster = shared.order.standing_plans, shared.order.roster
    if roster is not None and len(roster.node_ids()) > ALL_PLANS_UP_TO_NODES:
        plans = tuple(plan for plan in plans if node_id in plan.leaving)
    return OwnPart(plans, shared.silent if node_id in shared.ready else ())


def _members(session: Session, whose: dict[str, list[str]], *, now: datetime) -> defaultdict[str, _Nodes]:
    """By job. `whose`: `job_ids`, of which all members are wanted; or `named`, nodes that the jobs `namers` name."""
    none: dict[str, list[str]] = {"job_ids": [], "namers": [], "named": []}
    values = none | whose | {"horizon": horizon(now), "drain": DRAIN}
    found: defaultdict[str, _Nodes] = defaultdict(dict)
    for row in session.execute(_MEMBERS, values):
        nodes = found[row.job_id]
        if row.node_id not in nodes:
            nodes[row.node_id] = Neighbour(row.node_id, row.peer_url, row.state, row.slots)
        if row.kind is None:
            continue
        fact, node = as_fact(row), nodes[row.node_id]
        ends = over_at(fact, told_in=row.told_in, recorded_at=row.recorded_at)
        if now < ends:
            node.notices.append(fact)
            node.changes_at = min(ends, node.changes_at or ends)
    return found


def _may_end(job: JobRow) -> bool:
    """Whether ranks end now, or at a time that is told already."""
    return job.state in (JobState.STOPPING, JobState.SUSPENDING) or job.suspends_at is not None


def _spares(names: Sequence[str], nodes: _Nodes, roster: Roster | None) -> tuple[Member, ...]:
    """Their slots. A node that has joined the world meanwhile is none any more."""
    busy = set(roster.node_ids()) if roster is not None else set()
    return tuple(Member(name, slot) for name in names if name not in busy for slot in range(nodes[name].slots))


def _source(active: GenerationRow) -> GenerationSource:
    match SourceKind(active.source_kind):
        case SourceKind.INIT:
            return SourceInit()
        case SourceKind.CHECKPOINT:
            assert active.checkpoint_path is not None  # The database checks this too.
            return SourceCheckpoint(path=active.checkpoint_path, step=active.checkpoint_step or 0)
        case SourceKind.HANDOFF:
            return SourceHandoff(handoff_id=UUID(str(active.origin_id)))


def _later(job: JobRow, active: GenerationRow, spec: JobFile) -> LaterCheckpoints | None:
    """Ranks write checkpoints also while no agent hears them. Those up to the last damaged one are known here."""
    if spec.checkpoint is None or active.source_kind == SourceKind.HANDOFF:
        return None
    above = max(active.checkpoint_step or 0, job.damaged_step)
    return LaterCheckpoints(folder=spec.checkpoint.path, above=above, since=job.from_generation)


def _store(active: GenerationRow) -> StoreAddress | None:
    if active.store_host is None or active.store_port is None:
        return None
    return StoreAddress(host=active.store_host, port=active.store_port)


def _handoff_order(row: HandoffRow) -> HandoffOrder:
    return HandoffOrder(
        handoff_id=UUID(str(row.handoff_id)),
        parent=row.parent,
        cause=HandoffCause(row.cause),
        target=placement_of(row),
        leaving=tuple(row.leaving),
        plan_digest=row.plan_digest,
        proposed_utc=row.opened_at,
        deadline_utc=row.deadline_at,
        reason=row.reason[:2_000],
    )
