"""What one node is told, derived from the committed rows and nothing else."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from agent.protocol.base import HandoffCause, StoreAddress
from agent.protocol.jobfile import JobFile
from agent.protocol.sync import (
    DesiredState,
    GenerationSource,
    HandoffOrder,
    JobOrder,
    LayoutByCount,
    LayoutForCount,
    NoticeFact,
    NoticeKind,
    Refusal,
    SourceCheckpoint,
    SourceHandoff,
    SourceInit,
    StandingPlan,
    SyncOrders,
    SyncReport,
)
from service.handoffs.queries import open_handoff, placement_of
from service.handoffs.tables import HandoffRow
from service.jobs.queries import active_row, roster_of
from service.jobs.tables import GenerationRow, JobMemberRow, JobRow, JobState, SourceKind
from service.nodes.queries import nodes_by_id
from service.nodes.tables import NodeRow, NodeState
from service.notices.queries import as_notice, open_notices
from service.notices.rules import takes_node
from service.notices.tables import NoticeRow

ALL_PLANS_UP_TO_NODES = 64
"""Larger jobs send each node only the plan for its own loss: all plans to all nodes would grow with the square."""

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


def build_orders(
    session: Session, report: SyncReport, refusals: tuple[Refusal, ...], *, node: NodeRow, poll_s: float, now: datetime
) -> SyncOrders:
    """All jobs that this node is part of, or still has ranks of."""
    member_of = set(session.scalars(select(JobMemberRow.job_id).where(JobMemberRow.node_id == node.node_id)))
    wanted = member_of | {rank.job_id for rank in report.ranks}
    jobs = session.scalars(select(JobRow).where(JobRow.job_id.in_(wanted)).order_by(JobRow.job_id)).all()
    return SyncOrders(
        orders_seq=max((job.orders_seq for job in jobs), default=0),
        issued_utc=now,
        accepted_incarnation=UUID(str(node.agent_incarnation)),
        accepted_report_seq=node.report_seq,
        jobs=tuple(_job_order(session, job, node.node_id, now=now) for job in jobs),
        refusals=refusals,
        poll_s=poll_s,
    )


def _job_order(session: Session, job: JobRow, node_id: str, *, now: datetime) -> JobOrder:
    active = active_row(session, job)
    handoff = open_handoff(session, job.job_id)
    roster = roster_of(active) if active is not None else None
    told = session.scalars(select(JobMemberRow.node_id).where(JobMemberRow.job_id == job.job_id)).all()
    nodes = nodes_by_id(session, {*told, *(roster.node_ids() if roster else ())})
    noticed = open_notices(session, now=now, node_ids=nodes)
    going = {item.node_id for item in noticed if takes_node(as_notice(item))}
    return JobOrder(
        job_id=job.job_id,
        spec=JobFile.model_validate(job.spec),
        peer_key=job.peer_key,
        desired=_DESIRED[JobState(job.state)],
        generation=active.generation if active else None,
        origin_id=UUID(str(active.origin_id)) if active else None,
        source=_source(active) if active else None,
        roster=roster,
        next_generation=job.next_generation,
        peers={key: row.peer_url for key, row in nodes.items()},
        store_node=active.store_node if active else None,
        store=_store(active) if active else None,
        lead_order=_lead_order(roster.node_ids() if roster else (), nodes, going),
        standing_plans=_standing_plans(job, node_id, len(roster.node_ids()) if roster else 0),
        layouts_by_count=LayoutByCount(
            choices=tuple(LayoutForCount.model_validate(item, strict=False) for item in job.layouts_by_count)
        ),
        handoff=_handoff_order(handoff) if handoff is not None and handoff.proposer == "service" else None,
        notices=tuple(_notice_fact(item) for item in noticed),
        reason=job.reason[:2_000],
    )


def _lead_order(members: Sequence[str], nodes: dict[str, NodeRow], going: set[str]) -> tuple[str, ...]:
    """Who leads: members that stay and are heard, in rank order; then, for want of better, those that will go."""
    heard = [node_id for node_id in members if node_id in nodes and nodes[node_id].state == NodeState.READY]
    return tuple(sorted(heard, key=lambda node_id: node_id in going))


def _standing_plans(job: JobRow, node_id: str, members: int) -> tuple[StandingPlan, ...]:
    plans = [StandingPlan.model_validate(item, strict=False) for item in job.standing_plans]
    plans = [plan for plan in plans if plan.parent == job.active_generation]
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


def _notice_fact(row: NoticeRow) -> NoticeFact:
    return NoticeFact(
        node_id=row.node_id,
        kind=NoticeKind(row.kind),
        source=row.source,
        deadline_utc=row.deadline_at,
        first_seen_utc=row.first_seen_at,
        raw=row.raw,
    )
