"""Reads the fleet. Of history, only the last hours."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from agent.protocol.notice_life import DRAIN, NoticePhase
from agent.protocol.sync import NoticeKind
from service.handoffs.queries import open_handoffs
from service.handoffs.tables import HandoffRow
from service.jobs.tables import JobMemberRow, MemberRole
from service.leases.queries import current_prices
from service.leases.tables import LeaseRow, PoolPriceRow
from service.ledger.sums import HOUR, hour_of
from service.nodes.queries import jobs_of_nodes
from service.nodes.tables import NodeRow, NodeState
from service.notices.queries import as_fact, open_notices
from service.notices.rules import earliest_deadline, phase_of_all, takes_node
from service.notices.tables import NoticeRow
from service.paging import Pages

HOURS = 48
POOLS_MAX = 200
PENDING_MAX = 200
NODES_MAX = 20_000

_ANNOUNCED = text(
    f"""
    SELECT leases.pool, date_trunc('hour', notices.recorded_at, 'UTC') AS hour, count(*) AS number
      FROM notices JOIN leases USING (lease_id)
     WHERE notices.notice_id = notices.occurrence_id AND notices.recorded_at >= :since
       AND notices.kind IN ('interruption', 'maintenance') AND notices.source <> '{DRAIN}'
     GROUP BY 1, 2
    """
)
_UNANNOUNCED = text(
    """
    SELECT pool, date_trunc('hour', ended_at, 'UTC') AS hour, count(*) AS number
      FROM leases
     WHERE ended_at >= :since AND NOT EXISTS (
           SELECT FROM notices WHERE notices.lease_id = leases.lease_id AND notices.withdrawn_at IS NULL
              AND notices.kind IN ('interruption', 'maintenance'))
     GROUP BY 1, 2
    """
)


@dataclass(slots=True)
class PoolNow:
    """The nodes of a pool. `interruptions`, `unannounced`: how many went in each hour, the oldest first, with a notice
    and without one."""

    pool: str
    price: PoolPriceRow | None = None
    ready: int = 0
    silent: int = 0
    leaving: int = 0
    busy: int = 0
    slots: int = 0
    interruptions: list[int] = field(default_factory=lambda: [0] * HOURS)
    unannounced: list[int] = field(default_factory=lambda: [0] * HOURS)

    @property
    def nodes(self) -> int:
        """That are paid for."""
        return self.ready + self.silent


@dataclass(frozen=True, slots=True)
class Pending:
    """A node that is announced to go, and is still there."""

    number: int
    rows: Sequence[NoticeRow]
    pool: str
    jobs: tuple[str, ...]
    deadline_at: datetime | None
    phase: NoticePhase
    handoff: HandoffRow | None


def strip_since(now: datetime) -> datetime:
    """When the oldest hour begins that is counted."""
    return hour_of(now) - (HOURS - 1) * HOUR


def pools_now(session: Session, *, now: datetime) -> list[PoolNow]:
    """Pools that have nodes, a price, or lost a node lately, by name."""
    found: dict[str, PoolNow] = {}

    def of(pool: str) -> PoolNow:
        return found.setdefault(pool, PoolNow(pool))

    living = select(NodeRow.node_id, NodeRow.pool, NodeRow.state, NodeRow.slots).where(NodeRow.state != NodeState.GONE)
    busy = set(session.scalars(select(JobMemberRow.node_id).where(JobMemberRow.role != MemberRole.SPARE)))
    going = {row.node_id for row in open_notices(session, now=now) if takes_node(NoticeKind(row.kind))}
    for node in session.execute(living.limit(NODES_MAX)):
        pool = of(node.pool)
        pool.ready += node.state == NodeState.READY
        pool.silent += node.state == NodeState.SILENT
        pool.leaving += node.node_id in going
        pool.busy += node.node_id in busy
        pool.slots += node.slots
    since = strip_since(now)
    for statement, name in ((_ANNOUNCED, "interruptions"), (_UNANNOUNCED, "unannounced")):
        for row in session.execute(statement, {"since": since}):
            place = (row.hour - since) // HOUR
            if 0 <= place < HOURS:
                getattr(of(row.pool), name)[place] += row.number
    for price in current_prices(session, Pages(POOLS_MAX), now=now):
        of(price.pool).price = price
    return [found[name] for name in sorted(found)][:POOLS_MAX]


def pending_now(session: Session, *, now: datetime) -> list[Pending]:
    """Notices that count, the nearest deadline first."""
    rows: dict[int, list[NoticeRow]] = defaultdict(list)
    for row in open_notices(session, now=now):
        if takes_node(NoticeKind(row.kind)):
            rows[row.occurrence_id or row.notice_id].append(row)
    node_ids = {row.node_id for found in rows.values() for row in found}
    pools = _pools_of(session, {row.lease_id for found in rows.values() for row in found})
    jobs = jobs_of_nodes(session, node_ids)
    handoffs = open_handoffs(session, {job for found in jobs.values() for job in found}) if jobs else {}
    pending = []
    for number, found in rows.items():
        node_id = found[0].node_id
        facts = [as_fact(row) for row in found]
        answering = (handoffs.get(job) for job in jobs.get(node_id, ()))
        pending.append(
            Pending(
                number=number,
                rows=sorted(found, key=lambda row: row.first_seen_at),
                pool=pools[found[0].lease_id],
                jobs=tuple(jobs.get(node_id, ())),
                deadline_at=earliest_deadline(facts),
                phase=phase_of_all(facts, now),
                handoff=next((row for row in answering if row is not None and node_id in row.leaving), None),
            )
        )
    late = datetime.max.replace(tzinfo=now.tzinfo)
    return sorted(pending, key=lambda item: (item.deadline_at or late, item.number))[:PENDING_MAX]


def _pools_of(session: Session, lease_ids: set[int]) -> Mapping[int, str]:
    statement = select(LeaseRow.lease_id, LeaseRow.pool).where(LeaseRow.lease_id.in_(lease_ids))
    return {row.lease_id: row.pool for row in session.execute(statement)} if lease_ids else {}
