"""Reads of nodes: lists of them, and for a job those that it could use."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache

from sqlalchemy import Select, func, select, union_all
from sqlalchemy.orm import Session

from agent.protocol.jobfile import JobFile
from service.db.base import among
from service.jobs.tables import JobMemberRow, JobRow, MemberRole
from service.nodes.tables import NodeRow, NodeState
from service.paging import Pages
from service.planner.inputs import World

NODES_CONSIDERED_MAX = 10_000
NODES_MORE = 16
"""So many free nodes more than a job uses are looked at: some may be about to go."""


def list_nodes(
    session: Session, pages: Pages, *, states: Collection[NodeState] = (), pool: str | None = None
) -> Iterator[NodeRow]:
    """By name, read as they are asked for. `states`: any, if empty."""
    statement = select(NodeRow)
    if states:
        statement = statement.where(NodeRow.state.in_(states))
    if pool is not None:
        statement = statement.where(NodeRow.pool == pool)
    return pages.oldest(session, statement, NodeRow.node_id)


def jobs_of_nodes(session: Session, node_ids: Iterable[str]) -> Mapping[str, list[str]]:
    """The jobs that each of these nodes works for, not those whose spare it is."""
    found: dict[str, list[str]] = defaultdict(list)
    wanted = list(node_ids)
    for node_id, job_id in session.execute(_working(), {"node_ids": wanted}) if wanted else ():
        found[node_id].append(job_id)
    return found


@cache
def _working() -> Select[str, str]:
    return select(JobMemberRow.node_id, JobMemberRow.job_id).where(
        among(JobMemberRow.node_id, "node_ids"), JobMemberRow.role != MemberRole.SPARE
    )


def first_most(spec: JobFile) -> int:
    """So many free nodes are read first: with a policy, of each pool in each zone."""
    return spec.nodes.max + NODES_MORE


def every_node_of(session: Session, job: JobRow, world: World | None) -> Sequence[NodeRow]:
    """Living nodes that do not work for another job, and the members of the world in any state."""
    elsewhere = select(JobMemberRow.node_id).where(
        JobMemberRow.job_id != job.job_id, JobMemberRow.role != MemberRole.SPARE
    )
    mine = select(NodeRow.node_id).where(NodeRow.node_id.in_(world.node_ids() if world else ()))
    free = select(NodeRow.node_id).where(NodeRow.state != NodeState.GONE, NodeRow.node_id.not_in(elsewhere))
    return _by_name(session, mine, free)


def first_nodes_of(session: Session, job: JobRow, world: World | None, spec: JobFile) -> Sequence[NodeRow]:
    """The same, but of the free nodes only the first of those that the planner would take, and a few more."""
    elsewhere = select(JobMemberRow.node_id).where(
        JobMemberRow.job_id != job.job_id, JobMemberRow.role != MemberRole.SPARE
    )
    members = select(JobMemberRow.node_id).where(
        JobMemberRow.job_id == job.job_id, JobMemberRow.node_id.not_in(elsewhere)
    )
    mine = select(NodeRow.node_id).where(NodeRow.node_id.in_(world.node_ids() if world else ()))
    living = select(NodeRow.node_id).where(NodeRow.state != NodeState.GONE, NodeRow.node_id.in_(members))
    free = select(NodeRow.node_id).where(NodeRow.state == NodeState.READY, NodeRow.node_id.not_in(elsewhere))
    if spec.pools:
        free = free.where(NodeRow.pool.in_(spec.pools))
    order = (NodeRow.slots.desc(), NodeRow.node_id)
    if spec.policy is None:
        best = free.order_by(*order).limit(first_most(spec)).subquery()
        return _by_name(session, mine, living, select(best.c.node_id))
    # What is weighed by price and place needs the first of every pool and zone: the best may sort last.
    rank = func.row_number().over(partition_by=(NodeRow.pool, NodeRow.zone), order_by=order)
    ranked = free.add_columns(rank.label("rank")).subquery()
    best = select(ranked.c.node_id).where(ranked.c.rank <= first_most(spec))
    return _by_name(session, mine, living, best)


def _by_name(session: Session, *names: Select[str]) -> Sequence[NodeRow]:
    """The nodes that any of these names. Alternatives in one condition would have all nodes read that ever were."""
    statement = select(NodeRow).where(NodeRow.node_id.in_(union_all(*names))).order_by(NodeRow.node_id)
    return session.scalars(statement.limit(NODES_CONSIDERED_MAX)).all()
