"""Reads of jobs, and collects everything that the job rule and the planner need."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import inf
from statistics import median
from uuid import UUID

from sqlalchemy import func, or_, select, tuple_
from sqlalchemy.orm import Session

from agent.protocol.jobfile import JobFile
from agent.protocol.notice_life import bars_ranks, moves_jobs
from agent.protocol.sync import NoticeKind
from agent.protocol.values import HandoffState
from liver_core.layout import Roster
from service.db.parsed import Parsed
from service.db.roster_rows import roster_from
from service.handoffs import queries as handoffs
from service.handoffs.rules import OpenHandoff
from service.handoffs.tables import HandoffRow
from service.jobs import reported
from service.jobs.checkpoints import damaged_of, newest_checkpoint
from service.jobs.crashes import Crashes, RankError
from service.jobs.grants import cut_off
from service.jobs.stalls import is_late
from service.jobs.tables import (
    RANDOM_PART_CHARS,
    GenerationRow,
    JobMemberRow,
    JobRow,
    JobState,
    JobStepRow,
    MemberRole,
    SourceKind,
)
from service.jobs.tables import RankLogRow as LogRow
from service.jobs.view import JobView, Leaving
from service.leases.markets import weighed_markets
from service.ledger.remaining import remaining_of, spent_usd_of
from service.metrics.step_times import longest_step_s, measured_steps
from service.nodes.queries import every_node_of, first_most, first_nodes_of
from service.nodes.rules import announces_its_end, answers, has_outlived_its_end
from service.nodes.tables import NodeRow, NodeState
from service.notices.queries import as_fact, open_notices
from service.notices.rules import takes_node
from service.notices.tables import NoticeRow
from service.paging import Pages
from service.planner.change_cost import OWN_MOST, own_changes, state_bytes
from service.planner.decision import decide
from service.planner.goals import overspent
from service.planner.inputs import LayoutUse, OtherNodes, PlanInputs, PlanNode, World
from service.wires.queries import move_over, wires_between

LIST_MAX = 1_000
HISTORY_MAX = 64
SHOWN_MAX = 100
"""Generations and checkpoints that a job is shown with."""
OVERDUE_S, OVERDUE_POLLS = 3.0, 3.0
"""A node that has not reported for so long, in seconds and in polls, may be gone."""
STEPS_FOR_PACE = 25

_JOB_FILES = Parsed(JobFile.model_validate, most=LIST_MAX)
_ROSTERS: Parsed[Roster] = Parsed(roster_from, most=LIST_MAX)


@dataclass(frozen=True, slots=True)
class Situation:
    """One job at one moment: the view the rule needs and the inputs the planner needs, of the next world and of a
    restart."""

    job_id: str
    view: JobView
    inputs: PlanInputs
    restart: PlanInputs
    handoff_id: UUID | None


def list_jobs(
    session: Session,
    pages: Pages,
    *,
    match: str | None = None,
    name: str | None = None,
    states: Collection[JobState] = (),
) -> Sequence[JobRow]:
    """Newest first, without their plans. `match`: only those whose id, random part of the id, or name begins so;
    `name`: only those whose name does; `states`: any, if empty."""
    statement = select(JobRow)
    if match is not None:
        names = (JobRow.job_id, func.right(JobRow.job_id, RANDOM_PART_CHARS), JobRow.name)
        statement = statement.where(or_(*(part.startswith(match, autoescape=True) for part in names)))
    if name is not None:
        statement = statement.where(JobRow.name.startswith(name, autoescape=True))
    if states:
        statement = statement.where(JobRow.state.in_(states))
    return pages.newest(session, statement, JobRow.created_at, JobRow.job_id)


def active_row(session: Session, job: JobRow) -> GenerationRow | None:
    """The row of the job's active generation."""
    return session.get(GenerationRow, (job.job_id, job.active_generation)) if job.active_generation else None


def active_rows(session: Session, jobs: Iterable[JobRow]) -> dict[str, GenerationRow]:
    """The rows of the active generations of several jobs, of those that have one, in one statement."""
    wanted = [(job.job_id, job.active_generation) for job in jobs if job.active_generation is not None]
    statement = select(GenerationRow).where(tuple_(GenerationRow.job_id, GenerationRow.generation).in_(wanted))
    return {row.job_id: row for row in session.scalars(statement)}


def list_generations(session: Session, pages: Pages, job_id: str) -> Sequence[GenerationRow]:
    """Generations that became active, newest first."""
    return pages.newest(session, select(GenerationRow).where(GenerationRow.job_id == job_id), GenerationRow.generation)


def list_steps(session: Session, pages: Pages, job_id: str, *, after: int) -> Iterator[JobStepRow]:
    """Steps above `after` in the order they were made, read as they are asked for."""
    statement = select(JobStepRow).where(JobStepRow.job_id == job_id, JobStepRow.step > after)
    return pages.oldest(session, statement, JobStepRow.finished_at, JobStepRow.step, JobStepRow.generation)


def logs_of(session: Session, job_id: str, *, rank: int | None, after: int, limit: int) -> Sequence[LogRow]:
    """Log chunks with a `log_id` above `after`; the last `limit` of them when `after` is 0."""
    statement = select(LogRow).where(LogRow.job_id == job_id, LogRow.log_id > after)
    if rank is not None:
        statement = statement.where(LogRow.rank == rank)
    if after == 0:
        newest = session.scalars(statement.order_by(LogRow.log_id.desc()).limit(limit)).all()
        return newest[::-1]
    return session.scalars(statement.order_by(LogRow.log_id).limit(limit)).all()


def steps_per_s(session: Session, job: JobRow) -> float | None:
    """The pace of the active generation, by the median of its last steps; None while it has made none or stands."""
    if job.state != JobState.RUNNING or job.standstill is not None:
        return None
    statement = (
        select(JobStepRow.seconds)
        .where(JobStepRow.job_id == job.job_id, JobStepRow.generation == job.active_generation)
        .order_by(JobStepRow.step.desc())
        .limit(STEPS_FOR_PACE)
    )
    middle_s = median(found) if (found := session.scalars(statement).all()) else 0.0
    return 1.0 / middle_s if middle_s > 0 else None


@dataclass(frozen=True, slots=True)
class _Usable:
    """The nodes that are looked at for a job, what is announced of them, and what the planner makes of that."""

    nodes: Sequence[NodeRow]
    noticed: tuple[NoticeRow, ...]
    barred: set[str]
    going: set[str]
    inputs: PlanInputs
    restart: PlanInputs


def situation(session: Session, job: JobRow, *, poll_s: float, now: datetime) -> Situation:
    """Everything about one job, read in one transaction. Agents report every `poll_s` seconds or more often."""
    row = active_row(session, job)
    has_ranks = job.state in (JobState.STARTING, JobState.RUNNING, JobState.SUSPENDING, JobState.STOPPING)
    roster = roster_of(row) if row is not None else None
    world = World(roster.generation, roster.layout, tuple(roster.members)) if roster and has_ranks else None
    spec = job_file_of(job)
    spent_usd = spent_usd_of(session, job.job_id) if spec.budget_usd is not None else 0.0
    remaining = remaining_of(spec, last_step=job.last_step, spent_usd=spent_usd, now=now)
    # No more than the job could use are read, unless too many of those cannot be used, or a reason names the others.
    usable = _usable_of(session, job, world, first_nodes_of(session, job, world, spec), now=now)
    if len(usable.restart.nodes) <= spec.nodes.min or _are_left_out(spec, usable):
        usable = _usable_of(session, job, world, every_node_of(session, job, world), now=now)
    served_s = _served_s(spec, row, now)
    inputs, restart = (
        replace(item, remaining=remaining, served_s=served_s) for item in (usable.inputs, usable.restart)
    )
    handoff = handoffs.open_handoff(session, job.job_id)
    if len(restart.nodes) <= spec.nodes.min:
        # A reason for having too few nodes says where the others are.
        taken, out = _taken(session, job, spec), usable.going | usable.barred
        inputs, restart = (replace(each, others=_others(each, usable.nodes, out, taken)) for each in (inputs, restart))
    heard_since = now - timedelta(seconds=max(OVERDUE_S, OVERDUE_POLLS * poll_s))
    view = _view(
        session, job, inputs, restart,
        nodes=usable.nodes, noticed=usable.noticed, row=row, handoff=handoff, heard_since=heard_since, now=now,
    )  # fmt: skip
    seen = _seen(usable.nodes)
    view = replace(
        view,
        unconfirmed=reported.unconfirmed(seen, view.lost_at, heard_since),
        stopped=reported.stopped(seen, reported.ActiveWorld(job.job_id, job.active_generation)),
        told_at=_told_at(session, job, view.ahead),
        starts=handoffs.starts(session, job),
        longest_s=longest_step_s(session, job.job_id) if is_late(job, now) else 0.0,
        hang_restart_s=spec.hang_restart_s,
        hook_s_max=spec.hook_s_max,
        overspent=overspent(spent_usd, spec.budget_usd),
    )
    return Situation(job.job_id, view, inputs, restart, handoff.handoff_id if handoff else None)


def _served_s(spec: JobFile, row: GenerationRow | None, now: datetime) -> float:
    """0 while the patience of the job's policy lasts, then inf: plans are made anew for other inputs only."""
    if row is None or spec.policy is None:
        return inf
    return 0.0 if (now - row.created_at).total_seconds() < spec.policy.patience_s else inf


def _usable_of(
    session: Session, job: JobRow, world: World | None, nodes: Sequence[NodeRow], *, now: datetime
) -> _Usable:
    still_open = open_notices(session, now=now, node_ids=[node.node_id for node in nodes])
    noticed = tuple(item for item in still_open if moves_jobs(as_fact(item), now))
    barred = {item.node_id for item in still_open if bars_ranks(as_fact(item), now)}
    barred |= {node.node_id for node in nodes if announces_its_end(node.notice_source)}
    at_risk = {item.node_id for item in still_open if not takes_node(NoticeKind(item.kind))}
    # A member whose notice no longer moves the job keeps its ranks; nobody else gets any there.
    members = frozenset(world.node_ids() if world else ())
    going = {item.node_id for item in noticed} | (barred - members)
    spec = job_file_of(job)
    markets = weighed_markets(session, spec, job.job_id, {node.pool for node in nodes}, now=now)
    prices = {market.pool: market.usd_per_hour for market in markets}
    steps = measured_steps(session, job.job_id)
    inputs = PlanInputs(
        job=spec,
        nodes=tuple(
            PlanNode(
                node.node_id,
                node.slots,
                is_at_risk=node.node_id in at_risk,
                is_overdue=has_outlived_its_end(node.notice_source),
                zone=node.zone or "",
                device=node.device,
                pool=node.pool,
                usd_per_hour=prices.get(node.pool),
            )
            for node in nodes
            if node.node_id not in going and _usable(node, spec, members)
        ),
        world=world,
        step_seconds=tuple((each.layout, each.seconds) for each in steps),
        step_errors=tuple((each.layout, each.error) for each in steps),
        history=_history(session, job.job_id),
        markets=markets,
        changes=own_changes(handoffs.lost_seconds(session, job.job_id, most=OWN_MOST)) if markets else None,
        copy_s=_copy_s(session, job, spec, world) if markets else None,
    )
    return _Usable(nodes, noticed, barred, going, inputs, _restarting(inputs, nodes, barred))


def _copy_s(session: Session, job: JobRow, spec: JobFile, world: World | None) -> float | None:
    nodes = () if world is None else world.node_ids()
    return move_over(wires_between(session, job.job_id, nodes), state_bytes(spec), len(nodes)).copy_s


def _view(
    session: Session,
    job: JobRow,
    inputs: PlanInputs,
    restart: PlanInputs,
    *,
    nodes: Sequence[NodeRow],
    noticed: tuple[NoticeRow, ...],
    row: GenerationRow | None,
    handoff: HandoffRow | None,
    heard_since: datetime,
    now: datetime,
) -> JobView:
    members = set(inputs.world.node_ids()) if inputs.world else set()
    seen, known = _seen(nodes), reported.ActiveWorld(job.job_id, job.active_generation)
    ahead, ahead_by_member = reported.ahead_of(seen, known, members, heard_since)
    ended, broken = handoffs.last_ended(session, job.job_id), handoffs.broken_by(session, job)
    return JobView(
        state=JobState(job.state),
        state_changed_at=job.state_changed_at,
        now=now,
        decision=decide(inputs),
        restart=decide(restart),
        stop_requested=job.stop_requested_at is not None,
        world=inputs.world,
        source=SourceKind(row.source_kind) if row else None,
        handoff=_as_open(handoff, seen) if handoff else None,
        last_handoff_at=ended.recorded_at if ended else None,
        declined=handoffs.declined(session, ended, active=job.active_generation),
        leaving=reported.leaving_of(_told(noticed), members),
        revoked=tuple(sorted(cut_off(session, job.job_id, members, since=row.created_at))) if row else (),
        silent=reported.in_state(seen, members, NodeState.SILENT),
        gone=reported.in_state(seen, members, NodeState.GONE),
        answering=tuple(node.node_id for node in nodes if _may_live(node, now)),
        absent=_absent(session, ((handoff,) if handoff else ()) + tuple(broken)),
        broken=tuple(handoffs.as_loss(row) for row in broken),
        errors=reported.errors_of(seen, known),
        clues=_clues(session, job, handoff, broken),
        at_work=reported.at_work(seen, known) if is_late(job, now) else (),
        error_at=job.error_at,
        crashes=Crashes.of(job.crashes),
        ranks_left=_ranks_left(session, job) if job.state in (JobState.SUSPENDING, JobState.STOPPING) else 0,
        ahead=ahead,
        ahead_by_member=ahead_by_member,
        unheard=reported.unheard(seen, heard_since),
        steps_from_at=row.steps_from_at if row else None,
        unstepped_since=row.created_at if row and row.first_step_at is None and row.generation > 1 else None,
        lost_sight_of=handoffs.lost_sight_of(session, members, handoff, heard_since),
        last_step=job.last_step,
        last_step_at=job.last_step_at,
        step_s=dict(inputs.step_seconds).get(row.layout, 0.0) if row else 0.0,
        checkpoint=newest_checkpoint(session, job, job_file_of(job)),
        damaged=damaged_of(session, job),
        failed_starts=job.failed_starts,
        saves_at_end=job_file_of(job).checkpoint is not None,
        saves_soon=job.awaits_checkpoint,
        suspended_because=job.suspended_because,
        suspends_at=job.suspends_at,
        paused_because=job.paused_because,
    )


def _as_open(row: HandoffRow, seen: list[reported.NodeSeen]) -> OpenHandoff:
    return handoffs.as_open(row, crosses=reported.crosses(seen, row.job_id, (row.parent, row.generation)))


def _told_at(session: Session, job: JobRow, ahead: int | None) -> datetime | None:
    """When the handoff to generation `ahead` was told of last, if every rank of its world trains there."""
    row = None if ahead is None else handoffs.untold(session, job.job_id, ahead)
    if ahead is None or row is None or world_of(session, job.job_id, ahead) is None:
        return None
    return row.recorded_at


def world_of(session: Session, job_id: str, generation: int) -> Roster | None:
    """The world of a generation by what its ranks say, on nodes that have a part in the job; None where one of them
    does not make steps yet."""
    has_part = select(JobMemberRow.node_id).where(JobMemberRow.job_id == job_id)
    nodes = session.scalars(select(NodeRow).where(NodeRow.node_id.in_(has_part))).all()
    return reported.world_of(_seen(nodes), job_id, generation)


def _seen(nodes: Iterable[NodeRow]) -> list[reported.NodeSeen]:
    return [reported.NodeSeen(node.node_id, NodeState(node.state), node.last_seen_at, node.ranks) for node in nodes]


def _told(noticed: Iterable[NoticeRow]) -> list[Leaving]:
    return [Leaving(item.node_id, item.recorded_at, item.deadline_at) for item in noticed]


def _are_left_out(spec: JobFile, usable: _Usable) -> bool:
    """Whether nodes that were not read might be used: too few of those that were, in all or in one place, are ready."""

    def kind(node: NodeRow | PlanNode) -> tuple[str, str]:
        return (node.pool, node.zone or "") if spec.policy is not None else ("", "")

    read, ready = Counter(map(kind, usable.nodes)), Counter(map(kind, usable.restart.nodes))
    return any(count >= first_most(spec) and ready[each] < spec.nodes.max for each, count in read.items())


def _restarting(inputs: PlanInputs, nodes: Sequence[NodeRow], barred: set[str]) -> PlanInputs:
    """The inputs of a restart: without the present world, of which nothing can be saved, and with ready nodes only.
    Every rank is a new one then, so that no `barred` node gets any."""
    ready = {node.node_id for node in nodes if node.state == NodeState.READY} - barred
    return replace(inputs, world=None, nodes=tuple(node for node in inputs.nodes if node.node_id in ready))


def _taken(session: Session, job: JobRow, spec: JobFile) -> int:
    """How many ready nodes of the job's pools work for other jobs."""
    statement = (
        select(func.count())
        .select_from(NodeRow)
        .join(JobMemberRow, JobMemberRow.node_id == NodeRow.node_id)
        .where(JobMemberRow.job_id != job.job_id, JobMemberRow.role != MemberRole.SPARE)
        .where(NodeRow.state == NodeState.READY)
    )
    return session.scalars(statement.where(NodeRow.pool.in_(spec.pools)) if spec.pools else statement).one()


def _others(inputs: PlanInputs, nodes: Sequence[NodeRow], going: set[str], taken: int) -> OtherNodes:
    used = {node.node_id for node in inputs.nodes}
    rest = [node for node in nodes if node.node_id not in used]
    leaving = sum(node.node_id in going for node in rest)
    silent = sum(node.state != NodeState.READY for node in rest if node.node_id not in going)
    return OtherNodes(taken, leaving, silent, other_pool=len(rest) - leaving - silent)


def _may_live(node: NodeRow, now: datetime) -> bool:
    """Whether its machine answers, or its silence is perhaps the service's own."""
    return answers(node.answered_at, now) or (node.excused_until is not None and now < node.excused_until)


def _absent(session: Session, towards: Collection[HandoffRow]) -> tuple[str, ...]:
    """Targets of these handoffs that are silent or gone."""
    if not towards:
        return ()
    targets = {node for row in towards for node in handoffs.placement_of(row).node_ids()}
    not_ready = select(NodeRow.node_id).where(NodeRow.node_id.in_(targets), NodeRow.state != NodeState.READY)
    return tuple(session.scalars(not_ready.order_by(NodeRow.node_id)))


def _usable(node: NodeRow, spec: JobFile, members: frozenset[str]) -> bool:
    # A silent member may only have a slow agent. It counts until it is gone, or the job would leave a node that works.
    # A free node must be ready.
    if node.node_id in members:
        return node.state != NodeState.GONE
    return node.state == NodeState.READY and (not spec.pools or node.pool in spec.pools)


def _clues(
    session: Session, job: JobRow, handoff: HandoffRow | None, broken: Iterable[HandoffRow]
) -> tuple[RankError, ...]:
    """Errors of ranks of each next world that is past its boundary."""
    cuts_over = handoff is not None and handoff.state == HandoffState.CUTTING_OVER
    found: list[RankError] = []
    for row in (*((handoff,) if handoff is not None and cuts_over else ()), *broken):
        if row.generation is not None and row.parent == job.active_generation:
            nodes = select(NodeRow).where(NodeRow.node_id.in_(handoffs.placement_of(row).node_ids()))
            seen = _seen(session.scalars(nodes.order_by(NodeRow.node_id)))
            found += reported.clues_of(seen, reported.ActiveWorld(job.job_id, row.generation))
    return tuple(found)


def _ranks_left(session: Session, job: JobRow) -> int:
    """Rank processes of this job that living agents still report."""
    living = select(NodeRow).where(NodeRow.state != NodeState.GONE, NodeRow.ranks.contains([{"job_id": job.job_id}]))
    return reported.ranks_left(_seen(session.scalars(living)), job.job_id)


def _history(session: Session, job_id: str) -> tuple[LayoutUse, ...]:
    statement = (
        select(GenerationRow.nodes, GenerationRow.layout)
        .where(GenerationRow.job_id == job_id)
        .order_by(GenerationRow.generation.desc())
        .limit(HISTORY_MAX)
    )
    return tuple(LayoutUse(row.nodes, row.layout) for row in session.execute(statement).all()[::-1])


def count_without_orders(session: Session) -> int:
    """How many jobs get no orders, since what is stored of them makes none."""
    return session.execute(select(func.count()).where(JobRow.no_orders_because != "")).scalar_one()


def roster_of(row: GenerationRow) -> Roster:
    """The roster as it was stored."""
    return _ROSTERS.of((row.job_id, row.generation), row.roster)


def job_file_of(job: JobRow) -> JobFile:
    """The job file as it was stored."""
    return _JOB_FILES.of(job.job_id, job.spec)
