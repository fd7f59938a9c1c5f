"""Reads what followed from notices: handoffs, restarts, and what they cost. A page of incidents takes as many
statements as one, and none reads more because there is a longer history."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from agent.protocol.notice_life import DRAIN
from agent.protocol.sync import NoticeKind
from agent.protocol.values import HandoffState
from service.handoffs.tables import HandoffRow
from service.incidents.rules import (
    BEFORE_S,
    FAILURES,
    HANDOFFS_MAX,
    TAIL_S,
    Attempt,
    IncidentFacts,
    IncidentOutcome,
    outcome,
)
from service.incidents.tables import JobIncidentRow
from service.jobs.tables import ENDED, JobRow
from service.leases.tables import LeaseRow
from service.ledger.queries import by_generation
from service.ledger.tables import Cause
from service.notices.queries import as_fact, heads, open_notices, rows_of_occurrences
from service.notices.rules import earliest_deadline, phase_of_all, takes_node
from service.notices.tables import NoticeRow
from service.paging import Pages

EXAMINED_MAX = 2_000
"""Notices that are judged for one page of those that have failed."""
_SPANS = """
    unnest(CAST(:numbers AS bigint[]), CAST(:job_ids AS text[]), CAST(:node_ids AS text[]),
           CAST(:since AS timestamptz[]), CAST(:answered AS timestamptz[]), CAST(:until AS timestamptz[]))
           AS span (number, job_id, node_id, since, answered, until)
"""
_HANDOFFS = text(
    f"""
    SELECT span.number, found.handoff_id FROM {_SPANS}
     CROSS JOIN LATERAL (
           SELECT handoff_id, opened_at FROM handoffs
            WHERE handoffs.job_id = span.job_id AND opened_at >= span.since AND opened_at < span.answered
              AND jsonb_exists(leaving, span.node_id)
            ORDER BY opened_at LIMIT {HANDOFFS_MAX}) AS found
     ORDER BY span.number, found.opened_at
    """
)
# A restart of the job whose world before had a rank on the node.
_RESTARTS = text(
    f"""
    SELECT span.number, found.job_id, found.generation, found.parent, found.reason, found.lost_steps FROM {_SPANS}
     CROSS JOIN LATERAL (
           SELECT again.job_id, again.generation, again.parent, again.reason, again.lost_steps
             FROM job_generations AS again
             JOIN job_generations AS before ON before.job_id = again.job_id AND before.generation = (
                  SELECT max(generation) FROM job_generations AS earlier
                   WHERE earlier.job_id = again.job_id AND earlier.generation < again.generation)
            WHERE again.job_id = span.job_id AND again.created_at >= span.since AND again.created_at < span.until
              AND again.source_kind <> 'handoff'
              AND before.roster -> 'members' @> jsonb_build_array(jsonb_build_object('node_id', span.node_id))
            ORDER BY again.generation LIMIT {HANDOFFS_MAX}) AS found
     ORDER BY span.number, found.generation
    """
)
_PRICE_AT = """
    LATERAL (SELECT price_usd_per_hour AS usd, egress_usd_per_gb FROM pool_prices
              WHERE pool_prices.pool = {pool}
              ORDER BY (effective_from <= {at}) DESC,
                       CASE WHEN effective_from <= {at} THEN effective_from END DESC, effective_from LIMIT 1)
"""
# What the pause of a handoff took of every slot of the new world, and what it moved over the network.
_COSTS = text(
    f"""
    SELECT handoffs.handoff_id, pauses.usd AS pause_usd, pauses.unpriced, moved.bytes, moved.usd AS egress_usd
      FROM handoffs
     CROSS JOIN LATERAL (
           SELECT sum(price.usd / nodes.slots) * handoffs.pause_charged_s / 3600 AS usd,
                  count(*) FILTER (WHERE price.usd IS NULL) AS unpriced
             FROM jsonb_array_elements(handoffs.target -> 'members') AS member
             JOIN nodes ON nodes.node_id = member ->> 'node_id'
             LEFT JOIN {_PRICE_AT.format(pool="nodes.pool", at="handoffs.changed_at")} AS price ON true) AS pauses
      LEFT JOIN LATERAL (
           SELECT ledger_egress.bytes, ledger_egress.bytes * price.egress_usd_per_gb / 1000000000 AS usd
             FROM ledger_egress
             LEFT JOIN {_PRICE_AT.format(pool="ledger_egress.pool", at="ledger_egress.at")} AS price ON true
            WHERE ledger_egress.handoff_id = handoffs.handoff_id) AS moved ON true
     WHERE handoffs.handoff_id = ANY(CAST(:handoff_ids AS uuid[]))
    """
)


@dataclass(frozen=True, slots=True)
class StartedAgain:
    """A start of a job in place of a world that had a rank on the node."""

    job_id: str
    generation: int
    parent: int | None
    reason: str
    lost_steps: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Dollars of what an incident caused, by kind. `pause`: None where some price is not known."""

    pause: float | None = 0.0
    recompute: float = 0.0
    lost: float = 0.0
    fallback_restart: float = 0.0
    egress: float | None = 0.0

    @property
    def total(self) -> float | None:
        """All of it, and None where the prices of the slots are not known. What was moved counts where it has one."""
        if self.pause is None:
            return None
        return self.pause + self.recompute + self.lost + self.fallback_restart + (self.egress or 0.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """A notice, by the rows of all channels that announced it (the first one first), and what became of it."""

    number: int
    rows: Sequence[NoticeRow]
    lease: LeaseRow
    is_open: bool
    jobs: tuple[str, ...]
    handoffs: Sequence[HandoffRow]
    restarts: Sequence[StartedAgain]
    outcome: IncidentOutcome
    reason: str

    @property
    def drained(self) -> bool:
        """Whether a person asked for it."""
        return self.rows[0].source == DRAIN


@dataclass(frozen=True, slots=True)
class Incident(Judged):
    """The same with what it cost."""

    costs: Costs


@dataclass(frozen=True, slots=True)
class IncidentFilter:
    """Which incidents: of a node, of those that worked for a job, that count or do not, that have failed or have not.
    None: does not matter."""

    node_id: str | None = None
    job_id: str | None = None
    open: bool | None = None
    failed: bool | None = None


def list_incidents(session: Session, pages: Pages, wanted: IncidentFilter, *, now: datetime) -> list[Incident]:
    """A page of them, newest first. What has failed follows from everything that happened after a notice: with `failed`
    at most `EXAMINED_MAX` notices are judged for a page, which may then be short although another follows."""
    first = heads(node_id=wanted.node_id, job_id=wanted.job_id)
    if wanted.open is not None:
        counting = {row.occurrence_id for row in open_notices(session, now=now)}
        first = first.where(NoticeRow.notice_id.in_(counting) == wanted.open)
    if wanted.failed is None:
        numbers = [row.notice_id for row in pages.newest(session, first, NoticeRow.notice_id)]
        return incidents_of(session, rows_of_occurrences(session, numbers), now=now)

    def keep(rows: Sequence[NoticeRow]) -> list[Judged | None]:
        judged = _judge(session, rows_of_occurrences(session, [row.notice_id for row in rows]), now=now)
        return [item if (item.outcome in FAILURES) == wanted.failed else None for item in judged]

    kept = pages.newest_kept(session, first, NoticeRow.notice_id, keep=keep, read_max=EXAMINED_MAX)
    return _with_costs(session, kept)


def incidents_of(
    session: Session, occurrences: Sequence[tuple[int, Sequence[NoticeRow]]], *, now: datetime
) -> list[Incident]:
    """What followed from each of these notices."""
    return _with_costs(session, _judge(session, occurrences, now=now))


def list_job_incidents(session: Session, pages: Pages, job_id: str) -> Sequence[JobIncidentRow]:
    """Of one job, newest first."""
    statement = select(JobIncidentRow).where(JobIncidentRow.job_id == job_id)
    return pages.newest(session, statement, JobIncidentRow.incident_id)


def _with_costs(session: Session, judged: Sequence[Judged]) -> list[Incident]:
    costs = _costs_of(
        session, {item.number: item.handoffs for item in judged}, {item.number: item.restarts for item in judged}
    )
    return [
        Incident(**{field.name: getattr(each, field.name) for field in fields(Judged)}, costs=costs[each.number])
        for each in judged
    ]


def _judge(session: Session, occurrences: Sequence[tuple[int, Sequence[NoticeRow]]], *, now: datetime) -> list[Judged]:
    nodes = {row.node_id for _, rows in occurrences for row in rows}
    still_open = {row.notice_id for row in open_notices(session, now=now, node_ids=nodes)} if nodes else set()
    lease_ids = {rows[0].lease_id for _, rows in occurrences}
    leases = {row.lease_id: row for row in session.scalars(select(LeaseRow).where(LeaseRow.lease_id.in_(lease_ids)))}
    jobs = {number: tuple(sorted({job for row in rows for job in row.job_ids})) for number, rows in occurrences}
    spans = _spans(occurrences, jobs)
    attempts, restarts = _handoffs(session, spans), _restarts(session, spans)
    ended = _ended(session, {job for found in jobs.values() for job in found})
    found = []
    for number, rows in occurrences:
        became, why = outcome(
            IncidentFacts(
                phase=phase_of_all([as_fact(row) for row in rows], now),
                takes_node=any(takes_node(NoticeKind(row.kind)) for row in rows),
                jobs=len(jobs[number]),
                attempts=[_attempt(row) for row in attempts[number]],
                restarts=[item.reason for item in restarts[number]],
                gone=leases[rows[0].lease_id].ended_at is not None,
                ended=all(job in ended for job in jobs[number]),
            )
        )
        found.append(
            Judged(
                number=number,
                rows=rows,
                lease=leases[rows[0].lease_id],
                is_open=any(row.notice_id in still_open for row in rows),
                jobs=jobs[number],
                handoffs=attempts[number],
                restarts=restarts[number],
                outcome=became,
                reason=why,
            )
        )
    return found


def _attempt(row: HandoffRow) -> Attempt:
    return Attempt(HandoffState(row.state), row.reason, row.source_layout, row.target_layout, row.superseded)


def _spans(
    occurrences: Sequence[tuple[int, Sequence[NoticeRow]]], jobs: Mapping[int, Sequence[str]]
) -> Mapping[str, list[object]]:
    names = ("numbers", "job_ids", "node_ids", "since", "answered", "until")
    values: dict[str, list[object]] = {name: [] for name in names}
    for number, rows in occurrences:
        seen = min(row.first_seen_at for row in rows)
        deadline = earliest_deadline(as_fact(row) for row in rows)
        until = max(seen, deadline or seen) + timedelta(seconds=TAIL_S)
        # A handoff that is opened once the notice is withdrawn does not answer it.
        answered = min([until, *_withdrawn(rows)])
        for job_id in jobs[number]:
            row = (number, job_id, rows[0].node_id, seen - timedelta(seconds=BEFORE_S), answered, until)
            for values_of, value in zip(values.values(), row, strict=True):
                values_of.append(value)
    return values


def _withdrawn(rows: Sequence[NoticeRow]) -> tuple[datetime, ...]:
    """When the last channel took it back; empty while one says it."""
    times = [row.withdrawn_at for row in rows if row.withdrawn_at is not None]
    return (max(times),) if len(times) == len(rows) else ()


def _handoffs(session: Session, spans: Mapping[str, list[object]]) -> Mapping[int, list[HandoffRow]]:
    found: dict[int, list[HandoffRow]] = defaultdict(list)
    pairs = session.execute(_HANDOFFS, spans).all() if spans["numbers"] else []
    wanted = {pair.handoff_id for pair in pairs}
    rows = {}
    if wanted:
        statement = select(HandoffRow).where(HandoffRow.handoff_id.in_(wanted))
        rows = {row.handoff_id: row for row in session.scalars(statement)}
    for pair in pairs:
        found[pair.number].append(rows[pair.handoff_id])
    return found


def _restarts(session: Session, spans: Mapping[str, list[object]]) -> Mapping[int, list[StartedAgain]]:
    found: dict[int, list[StartedAgain]] = defaultdict(list)
    for number, *rest in session.execute(_RESTARTS, spans) if spans["numbers"] else ():
        found[number].append(StartedAgain(*rest))
    return found


def _ended(session: Session, jobs: set[str]) -> set[str]:
    """Those that have ended, or are deleted."""
    if not jobs:
        return set()
    living = select(JobRow.job_id).where(JobRow.job_id.in_(jobs), JobRow.state.not_in(ENDED))
    return jobs - set(session.scalars(living))


def _costs_of(
    session: Session, handoffs: Mapping[int, Sequence[HandoffRow]], restarts: Mapping[int, Sequence[StartedAgain]]
) -> Mapping[int, Costs]:
    ids = {row.handoff_id for rows in handoffs.values() for row in rows}
    found = session.execute(_COSTS, {"handoff_ids": list(ids)}) if ids else ()
    of_handoff: dict[UUID, tuple[float | None, float | None]] = {
        row.handoff_id: (
            None if row.unpriced else float(row.pause_usd or 0),
            0.0 if not row.bytes else None if row.egress_usd is None else float(row.egress_usd),
        )
        for row in found
    }
    wanted: dict[str, set[int]] = defaultdict(set)
    for item in (item for items in restarts.values() for item in items):
        wanted[item.job_id] |= {item.generation, *([item.parent] if item.parent else [])}
    sums = {job_id: by_generation(session, job_id, sorted(numbers)) for job_id, numbers in wanted.items()}
    costs: dict[int, Costs] = defaultdict(Costs)
    for number in {*handoffs, *restarts}:
        pauses = [of_handoff[row.handoff_id] for row in handoffs.get(number, ())]
        spent: dict[Cause, float] = defaultdict(float)
        for item in restarts.get(number, ()):
            for each in sums[item.job_id][item.generation]:
                spent[each.cause] += each.dollars
            for each in sums[item.job_id].get(item.parent or 0, ()):
                spent[each.cause] += each.dollars if each.cause is Cause.LOST else 0.0
        costs[number] = Costs(
            pause=_sum([pause for pause, _ in pauses]),
            recompute=spent[Cause.RECOMPUTE],
            lost=spent[Cause.LOST],
            fallback_restart=spent[Cause.FALLBACK_RESTART],
            egress=_sum([egress for _, egress in pauses]),
        )
    return costs


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
