"""Makes the orders of one node, from stored rows and nothing else."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import select, text

from agent.protocol.notice_life import DRAIN, bars_ranks, ends_utc, key_of
from agent.protocol.sync import (
    PROBES_MAX,
    DesiredState,
    GenerationSource,
    HandoffOrder,
    JobOrder,
    LayoutByCount,
    LayoutForCount,
    NoticeFact,
    SourceCheckpoint,
    SourceHandoff,
    SourceInit,
    StandingPlan,
    SyncOrders,
)
from agent.protocol.values import HandoffCause
from liver_core.handoff import StoreAddress
from liver_core.layout.limits import NODES_MAX
from service.db.base import among
from service.db.parsed import Parsed
from service.handoffs.queries import open_handoffs, placement_of
from service.handoffs.tables import HandoffRow
from service.jobs.queries import LIST_MAX, job_file_of, roster_of
from service.jobs.tables import GenerationRow, JobRow, JobState, SourceKind
from service.nodes.tables import NodeState
from service.notices.queries import as_fact
from service.notices.rules import horizon
from service.sync.intake import Intake

PROBING_NODES = 3
ALL_PLANS_UP_TO_NODES = 64
"""In larger jobs a node gets only the plan for its own loss: all plans for all nodes would grow with the square."""

_DESIRED = {
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

_JOBS = select(JobRow).where(among(JobRow.job_id, "job_ids"))
# One row for each member of a job, and for each notice about it that may count: its newest row says all of it.
_MEMBERS = text(
    """
    SELECT members.job_id, nodes.node_id, nodes.peer_url, nodes.state, notices.notice_id, notices.kind, notices.source,
           notices.deadline_at, notices.first_seen_at, notices.withdrawn_at, notices.raw
      FROM (SELECT job_id, node_id FROM job_members
             WHERE job_id IN (SELECT unnest(CAST(:job_ids AS text[]))
                              UNION SELECT job_id FROM job_members WHERE node_id = :node_id)
            UNION ALL SELECT '', unnest(CAST(:node_ids AS text[]))) AS members
      JOIN nodes ON nodes.node_id = members.node_id
      LEFT JOIN (notices JOIN leases ON leases.lease_id = notices.lease_id AND leases.ended_at IS NULL)
        ON notices.node_id = nodes.node_id
       AND (notices.deadline_at > :horizon OR notices.first_seen_at > :horizon
            OR (notices.source = :drain AND (notices.withdrawn_at IS NULL OR notices.withdrawn_at > :horizon)))
       AND NOT EXISTS (SELECT FROM notices AS newer WHERE newer.lease_id = notices.lease_id
                          AND newer.kind = notices.kind AND newer.source = notices.source
                          AND newer.notice_id > notices.notice_id)
    """
)
_PLANS: Parsed[tuple[StandingPlan, ...]] = Parsed(
    lambda stored: tuple(StandingPlan.model_validate(item, strict=False) for item in stored), most=LIST_MAX
)
_LAYOUTS: Parsed[LayoutByCount] = Parsed(
    lambda stored: LayoutByCount(choices=tuple(LayoutForCount.model_validate(item, strict=False) for item in stored)),
    most=LIST_MAX,
)


@dataclass(slots=True)
class Neighbour:
    """A node as the orders of its job describe it, with its notices: also withdrawn ones, so that whoever was told of
    them hears that they do not count any more. What is over is in no order."""

    node_id: str
    peer_url: str
    state: str
    notices: list[NoticeFact] = field(default_factory=list)


_Nodes = dict[str, Neighbour]


def build_orders(intake: Intake, *, poll_s: float, lost_after_s: float) -> SyncOrders:
    """Orders for all jobs that the reporting node is a member of or still has ranks of. `lost_after_s`: when no member
    of a job is heard for so long, the job may be started elsewhere."""
    node, session = intake.node, intake.session
    with_ranks = {rank.job_id for rank in intake.report.ranks}
    members = _members(intake, node_id=node.node_id, job_ids=with_ranks)
    wanted = with_ranks | {job_id for job_id, nodes in members.items() if node.node_id in nodes}
    found = {job_id: job for job_id, job in intake.jobs.items() if job_id in wanted}
    if wanted - found.keys():
        missing = session.scalars(_JOBS, {"job_ids": list(wanted - found.keys())})
        found |= {job.job_id: job for job in missing}
    jobs = [found[job_id] for job_id in sorted(found)]
    handoffs = open_handoffs(session, found) if found else {}
    return SyncOrders(
        orders_seq=max((job.orders_seq for job in jobs), default=0),
        issued_utc=intake.now,
        accepted_incarnation=UUID(str(node.agent_incarnation)),
        accepted_report_seq=node.report_seq,
        jobs=tuple(
            _job_order(intake, job, members.get(job.job_id, {}), handoffs.get(job.job_id), lost_after_s) for job in jobs
        ),
        refusals=tuple(intake.refusals),
        poll_s=poll_s,
    )


def _members(
    intake: Intake, *, node_id: str | None = None, job_ids: Iterable[str] = (), node_ids: Iterable[str] = ()
) -> dict[str, _Nodes]:
    """The member nodes by job: of the given jobs, and of every job that `node_id` is a member of. Also the nodes of
    `node_ids`, under the empty job id."""
    values = {
        "job_ids": list(job_ids),
        "node_ids": list(node_ids),
        "node_id": node_id,
        "horizon": horizon(intake.now),
        "drain": DRAIN,
    }
    members: dict[str, _Nodes] = defaultdict(dict)
    for row in intake.session.execute(_MEMBERS, values):
        nodes = members[row.job_id]
        if row.node_id not in nodes:
            nodes[row.node_id] = Neighbour(row.node_id, row.peer_url, row.state)
        if row.kind is not None and intake.now < ends_utc(fact := as_fact(row)):
            nodes[row.node_id].notices.append(fact)
    return members


def _job_order(intake: Intake, job: JobRow, nodes: _Nodes, handoff: HandoffRow | None, lost_after_s: float) -> JobOrder:
    active = intake.generation(job.job_id, job.active_generation) if job.active_generation else None
    roster, spec = roster_of(active) if active is not None else None, job_file_of(job)
    unknown = set(roster.node_ids()) - nodes.keys() if roster else set()
    if unknown:
        # Nodes of the roster that are no longer members of the job still get each other's addresses.
        nodes = nodes | _members(intake, node_ids=unknown).get("", {})
    noticed = sorted((item for node in nodes.values() for item in node.notices), key=key_of)
    going = {item.node_id for item in noticed if bars_ranks(item, intake.now)}
    return JobOrder(
        job_id=job.job_id,
        spec=spec,
        peer_key=job.peer_key,
        desired=_DESIRED[JobState(job.state)],
        generation=active.generation if active else None,
        origin_id=UUID(str(active.origin_id)) if active else None,
        source=_source(active) if active else None,
        roster=roster,
        next_generation=job.next_generation,
        peers={node_id: node.peer_url for node_id, node in nodes.items()},
        store_node=active.store_node if active else None,
        store=_store(active) if active else None,
        lead_order=_lead_order(roster.node_ids() if roster else (), nodes, going),
        standing_plans=_standing_plans(job, intake.node.node_id, len(roster.node_ids()) if roster else 0),
        layouts_by_count=_LAYOUTS.of(job.job_id, job.layouts_by_count),
        handoff=_handoff_order(handoff) if handoff is not None and handoff.proposer == "service" else None,
        checkpoint_asked=job.checkpoints_asked if job.awaits_checkpoint else 0,
        saves_at_end=job.state in (JobState.STOPPING, JobState.SUSPENDING) and spec.checkpoint is not None,
        notices=tuple(noticed[:NODES_MAX]),
        probe=_probe(intake.node.node_id, nodes),
        lost_after_s=lost_after_s,
        reason=job.reason[:2_000],
    )


def _lead_order(members: Sequence[str], nodes: _Nodes, going: set[str]) -> tuple[str, ...]:
    """The order in which nodes lead: ready members that stay, in rank order; then ready members that will go."""
    ready = [node_id for node_id in members if node_id in nodes and nodes[node_id].state == NodeState.READY]
    return tuple(sorted(ready, key=lambda node_id: node_id in going))


def _probe(reporter: str, nodes: _Nodes) -> tuple[str, ...]:
    """The silent members, for the first few that are not: do their machines still answer?"""
    ready = sorted(name for name, node in nodes.items() if node.state == NodeState.READY)
    if reporter not in ready[:PROBING_NODES]:
        return ()
    return tuple(sorted(name for name, node in nodes.items() if node.state == NodeState.SILENT)[:PROBES_MAX])


def _standing_plans(job: JobRow, node_id: str, members: int) -> tuple[StandingPlan, ...]:
    plans = [plan for plan in _PLANS.of(job.job_id, job.standing_plans) if plan.parent == job.active_generation]
    if members > ALL_PLANS_UP_TO_NODES:
        plans = [plan for plan in plans if node_id in plan.leaving]
    return tuple(plans)


def _source(active: GenerationRow) -> GenerationSource:
    match SourceKind(active.source_kind):
        case SourceKind.INIT:
            return SourceInit()
        case SourceKind.CHECKPOINT:
            assert active.checkpoint_path is not None  # The database checks this too.
            return SourceCheckpoint(path=active.checkpoint_path, step=active.checkpoint_step or 0)
        case SourceKind.HANDOFF:
            return SourceHandoff(handoff_id=UUID(str(active.origin_id)))


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
