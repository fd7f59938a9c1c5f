"""One sync: stores a whole report in one transaction. `service.sync.orders` makes the answer from the stored rows.

Lock order, here and in the reconcilers: the node, then jobs by id, then ledger tails. A report is applied at most once
for each (agent_incarnation, report_seq). Every fact also has its own key, so a fact sent again changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from operator import attrgetter

from sqlalchemy import bindparam, delete, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.sync import REFUSALS_MAX, NoticeFact, Refusal, SyncReport
from liver_core.handoff import RankStage
from liver_core.layout.limits import NAME_CHARS_MAX, fitting
from service.db.wake import RECONCILERS, job_topic, notify
from service.handoffs.operations import decline_handoff, mirror_handoff, name_cause
from service.jobs.causes import FailedPart, FirstCause, cause_of_rank
from service.jobs.membership import refresh_members
from service.jobs.operations import burn, close_generation, lock_job, set_state, touch
from service.jobs.tables import (
    ENDED,
    CheckpointRow,
    GenerationRow,
    JobMemberRow,
    JobRow,
    JobState,
    MemberRole,
    SourceKind,
)
from service.leases.operations import ensure_lease
from service.leases.queries import open_lease
from service.leases.tables import LeaseRow
from service.ledger.operations import Spent, account_all
from service.ledger.rules import LOST, SlotFacts, cause_of
from service.ledger.tables import Cause
from service.nodes.operations import lock_node, note_answers, store_node
from service.nodes.skew import SAME_WITHIN, Skew, in_service_time, measured, off_by
from service.nodes.tables import NodeRow
from service.notices.operations import record_notice
from service.notices.queries import known_of_lease
from service.notices.rules import withdrawn_by
from service.problems import ProblemError
from service.sync.reach import Reach, within_reach
from service.sync.reading import Reading

# Rows come as one array per column: one statement for any number of rows, compiled and prepared once. Several ranks
# report one step, and each knows only part of it: a later row fills the empty columns of an earlier one.
_ADD_ROWS = text(
    """
    WITH logged AS (
         INSERT INTO rank_logs (job_id, generation, rank, start_offset, text, recorded_at)
         SELECT *, CAST(:now AS timestamptz) FROM unnest(
                CAST(:log_job_id AS text[]), CAST(:log_generation AS bigint[]), CAST(:log_rank AS bigint[]),
                CAST(:log_start_offset AS bigint[]), CAST(:log_text AS text[]))
         ON CONFLICT DO NOTHING)
    INSERT INTO steps (job_id, generation, step, seconds, loss, consumed_samples, sample_digest, tokens, finished_at)
    SELECT * FROM unnest(
           CAST(:job_id AS text[]), CAST(:generation AS bigint[]), CAST(:step AS bigint[]), CAST(:seconds AS float8[]),
           CAST(:loss AS float8[]), CAST(:consumed_samples AS bigint[]), CAST(:sample_digest AS text[]),
           CAST(:tokens AS bigint[]), CAST(:finished_at AS timestamptz[]))
    ON CONFLICT (job_id, generation, step) DO UPDATE
       SET loss = coalesce(steps.loss, excluded.loss),
           consumed_samples = coalesce(steps.consumed_samples, excluded.consumed_samples),
           sample_digest = coalesce(steps.sample_digest, excluded.sample_digest),
           tokens = coalesce(steps.tokens, excluded.tokens)
     WHERE (steps.loss IS NULL AND excluded.loss IS NOT NULL)
        OR (steps.consumed_samples IS NULL AND excluded.consumed_samples IS NOT NULL)
        OR (steps.sample_digest IS NULL AND excluded.sample_digest IS NOT NULL)
        OR (steps.tokens IS NULL AND excluded.tokens IS NOT NULL)
    """
)
_NODES_OF_JOB = select(JobMemberRow.node_id).where(JobMemberRow.job_id == bindparam("job_id"))
_STEP_COLUMNS = {
    name: name
    for name in ("job_id", "generation", "step", "seconds", "loss", "consumed_samples", "sample_digest", "tokens")
} | {"finished_at": "finished_utc"}
_LOG_COLUMNS = {
    "log_job_id": "job_id",
    "log_generation": "generation",
    "log_rank": "rank",
    "log_start_offset": "offset",
}


@dataclass(slots=True)
class Intake:
    """One report on its way into the database.

    `changed`: jobs whose orders are different now. `due`: jobs whose reconciler should look again. `watched`: jobs with
    news for their watchers only.
    """

    session: Session
    report: SyncReport
    node: NodeRow
    now: datetime
    jobs: dict[str, JobRow]
    changed: set[str]
    due: set[str]
    watched: set[str]
    refusals: list[Refusal]
    generations: dict[tuple[str, int], GenerationRow | None] = field(default_factory=dict)

    def generation(self, job_id: str, number: int) -> GenerationRow | None:
        """A generation of a locked job, read once: after the handoffs are stored, no new one is made."""
        key = (job_id, number)
        if key not in self.generations:
            self.generations[key] = self.session.get(GenerationRow, key)
        return self.generations[key]

    def refuse(self, part: str, key: object, reason: str) -> None:
        """Reject this part. The agent gets the refusal once and must not send the part again."""
        if len(self.refusals) < REFUSALS_MAX:
            self.refusals.append(Refusal(part=part, key=fitting(str(key), NAME_CHARS_MAX), reason=fitting(reason)))


def apply_report(session: Session, reading: Reading, *, now: datetime, arrived: datetime | None = None) -> Intake:
    """Store what could be read of a report. Raises 409 for an agent start that has been replaced. `arrived`: when the
    report did, if not now."""
    report = reading.report
    reporter = lock_node(session, report, now=now)
    node = reporter.node
    intake = Intake(session, report, node, now, {}, set(), set(), set(), list(reading.refusals[:REFUSALS_MAX]))
    if not reporter.is_news:
        node.last_seen_at = now
        return intake
    report = intake.report = in_service_time(report, _measure_clock(node, report, arrived or now))
    ranks_before = {_standing(rank["job_id"], rank["rank"], rank["stage"]) for rank in node.ranks}
    source_before = node.notice_source
    is_changed = store_node(node, report, now=now) or reporter.is_new
    info = report.node
    with session.no_autoflush:
        # Neither call reads the changes made so far; those are written at once, below.
        lease = ensure_lease(session, node_id=info.node_id, pool=info.pool, slots=info.slots, now=now)
        notices = report.notices
        if node.notice_source != source_before and info.notice_source is not None:
            known = known_of_lease(session, lease.lease_id, now=now)
            notices += withdrawn_by(info.notice_source, known, now)
        _lock_jobs(intake, notices)
    _take_out_of_reach(intake)
    note_answers(session, intake.report, now=now)
    _store_notices(intake, lease, notices)
    _store_handoffs(intake)
    _store_stores(intake)
    with session.no_autoflush:
        _store_rows(intake)
        _store_progress(intake)
    _store_checkpoints(intake)
    _store_finished(intake)
    session.flush()
    _account(intake, lease)
    ranks_now = {_standing(rank.job_id, rank.rank, rank.stage) for rank in intake.report.ranks}
    intake.due.update(job_id for job_id, _, _ in ranks_before ^ ranks_now)
    _note_errors(intake, ranks_now - ranks_before)
    _wake(intake, all_jobs=is_changed)
    session.flush()
    return intake


def _measure_clock(node: NodeRow, report: SyncReport, arrived: datetime) -> timedelta:
    """How far the node's clock is ahead, as far as that matters."""
    known = None
    if node.clock_ahead_s is not None and node.clock_at is not None:
        known = Skew(node.clock_ahead_s, node.clock_at)
    skew = measured(known, issued=report.issued_utc, arrived=arrived)
    node.clock_ahead_s, node.clock_at = skew.ahead_s, skew.at
    return off_by(skew.ahead_s)


def _lock_jobs(intake: Intake, notices: tuple[NoticeFact, ...]) -> None:
    """Lock every job that the report concerns, in order of id."""
    report = intake.report
    members = select(JobMemberRow.job_id).where(JobMemberRow.node_id == intake.node.node_id)
    noticed = set(intake.session.scalars(members)) if notices else set()
    parts: tuple[Iterable, ...] = (
        report.handoffs, report.declined, report.steps, report.checkpoints, report.stores, report.finished,
        report.ranks, report.logs,
    )  # fmt: skip
    for job_id in sorted(noticed | {item.job_id for part in parts for item in part}):
        try:
            intake.jobs[job_id] = lock_job(intake.session, job_id)
        except ProblemError:
            intake.refuse("jobs", job_id, f"there is no job {job_id!r} here; end its ranks")


def _take_out_of_reach(intake: Intake) -> None:
    reach = {
        job_id: Reach.of(next_generation=job.next_generation, checkpoints_asked=job.checkpoints_asked)
        for job_id, job in intake.jobs.items()
    }
    report, intake.report = intake.report, within_reach(intake.report, reach, intake.refuse)
    if intake.report.ranks is not report.ranks:
        intake.node.ranks = [rank.model_dump(mode="json") for rank in intake.report.ranks]


def _store_notices(intake: Intake, lease: LeaseRow, notices: tuple[NoticeFact, ...]) -> None:
    for fact in notices:
        found = lease if fact.node_id == intake.node.node_id else _lease_of_peer(intake, fact)
        is_exact = found is lease and not off_by(intake.node.clock_ahead_s)
        same_within = timedelta(0) if is_exact else SAME_WITHIN
        if found is not None and record_notice(
            intake.session, fact, lease_id=found.lease_id, now=intake.now, same_within=same_within
        ):
            members = select(JobMemberRow.job_id).where(JobMemberRow.node_id == fact.node_id)
            intake.changed.update(job_id for job_id in intake.session.scalars(members) if job_id in intake.jobs)


def _lease_of_peer(intake: Intake, fact: NoticeFact) -> LeaseRow | None:
    """The lease of another node of a job of the reporting one: it passes on what that node's agent told it, in case
    that agent was gone before the service heard of it. None, and the fact is refused, for any other node, and for a
    withdrawal, which is the node's own to report. The job is locked, so that all who report this wait for each other.
    """
    session, own = intake.session, intake.node.node_id
    jobs = select(JobMemberRow.job_id).where(
        JobMemberRow.job_id.in_(intake.jobs), JobMemberRow.role != MemberRole.SPARE
    )
    shared = session.scalars(jobs.where(JobMemberRow.node_id == fact.node_id).limit(1)).one_or_none()
    if shared is None or own not in session.scalars(_NODES_OF_JOB, {"job_id": shared}).all():
        intake.refuse("notices", fact.node_id, f"agent of {own} may report notices of its own and its jobs' nodes only")
    elif fact.withdrawn_utc is not None:
        intake.refuse("notices", fact.node_id, f"a withdrawal is reported by {fact.node_id} itself")
    else:
        lease = open_lease(session, fact.node_id)
        # One of the machine that had this name before does not count.
        return lease if lease is not None and fact.first_seen_utc >= lease.started_at else None
    return None


def _store_handoffs(intake: Intake) -> None:
    # Oldest generation first: agents that worked without the service may report several, each the parent of the next.
    for mirror in sorted(intake.report.handoffs, key=attrgetter("generation", "mirror_seq")):
        job = intake.jobs.get(mirror.job_id)
        if job is None:
            continue
        mirrored = mirror_handoff(intake.session, job, mirror, now=intake.now)
        if mirrored.refusal is not None:
            intake.refuse("handoffs", mirror.handoff_id, mirrored.refusal)
        (intake.changed if mirrored.orders_differ else intake.watched).add(job.job_id)
    for declined in intake.report.declined:
        job = intake.jobs.get(declined.job_id)
        if job is None:
            continue
        refusal = decline_handoff(intake.session, job, declined, node_id=intake.node.node_id, now=intake.now)
        if refusal is not None:
            intake.refuse("declined", declined.handoff_id, refusal)
        intake.changed.add(job.job_id)


def _store_stores(intake: Intake) -> None:
    for store in intake.report.stores:
        row = intake.generation(store.job_id, store.generation)
        if row is None or (row.store_node, row.store_host, row.store_port) == (
            intake.node.node_id, store.host, store.port,
        ):  # fmt: skip
            continue
        row.store_node, row.store_host, row.store_port = intake.node.node_id, store.host, store.port
        intake.changed.add(store.job_id)


def _store_rows(intake: Intake) -> None:
    """Store steps and logs. If a step comes twice, the later row counts."""
    steps = [step for step in intake.report.steps if step.job_id in intake.jobs]
    logs = [chunk for chunk in intake.report.logs if chunk.job_id in intake.jobs]
    if steps or logs:
        unique = {(step.job_id, step.generation, step.step): step for step in steps}
        values = {name: [getattr(step, part) for step in unique.values()] for name, part in _STEP_COLUMNS.items()}
        values |= {name: [getattr(chunk, part) for chunk in logs] for name, part in _LOG_COLUMNS.items()}
        values["log_text"] = [chunk.text.replace("\x00", "") for chunk in logs]
        intake.session.execute(_ADD_ROWS, values | {"now": intake.now})
    last: dict[tuple[str, int], int] = {}
    for step in steps:
        key = (step.job_id, step.generation)
        last[key] = max(step.step, last.get(key, 0))
    for (job_id, generation), number in sorted(last.items()):
        _advance(intake, intake.jobs[job_id], generation=generation, step=number)


def _store_progress(intake: Intake) -> None:
    """Ranks also report their step, so that a job's progress is known even if step rows come late."""
    for rank in intake.report.ranks:
        job = intake.jobs.get(rank.job_id)
        if job is None:
            continue
        burn(job, rank.generation)
        if rank.step > 0 and rank.stage is not RankStage.STARTING:
            _advance(intake, job, generation=rank.generation, step=rank.step)


def _advance(intake: Intake, job: JobRow, *, generation: int, step: int) -> None:
    """Record that the job has made `step` in `generation`."""
    if generation != job.active_generation:
        _count_lost(intake, job, generation=generation, step=step)
        return
    if job.state in ENDED:
        return
    row = intake.generation(job.job_id, generation)
    begun_at = (row.checkpoint_step or 0) if row is not None else 0
    if step > job.last_step:
        job.last_step = step
        job.last_step_at = intake.now
        job.highest_step = max(job.highest_step, step)
    if row is not None and row.first_step_at is None and step > begun_at:
        row.first_step_at = intake.now
    if job.state == JobState.STARTING and step > begun_at:
        set_state(job, JobState.RUNNING, f"training since step {step}; {job.reason}", now=intake.now)
        job.failed_starts = 0
        intake.changed.add(job.job_id)


def _count_lost(intake: Intake, job: JobRow, *, generation: int, step: int) -> None:
    """The report of this step was on its way when the service replaced its world by a start, or it was made by the
    world of a handoff that had not become active by then: the step is lost too."""
    successor = intake.session.scalars(
        select(GenerationRow)
        .where(
            GenerationRow.job_id == job.job_id,
            GenerationRow.generation > generation,
            GenerationRow.source_kind != SourceKind.HANDOFF,
        )
        .order_by(GenerationRow.generation)
        .limit(1)
    ).one_or_none()
    if successor is None:
        return
    more = step - (successor.checkpoint_step or 0) - successor.lost_steps
    if more > 0:
        successor.lost_steps += more
        job.lost_steps += more
        successor.repeats_until = max(successor.repeats_until, step)
        job.highest_step = max(job.highest_step, step)
        intake.watched.add(job.job_id)


def _store_checkpoints(intake: Intake) -> None:
    for fact in intake.report.checkpoints:
        job = intake.jobs.get(fact.job_id)
        if job is None:
            continue
        values = {
            "job_id": fact.job_id,
            "path": fact.path,
            "generation": fact.generation,
            "step": fact.step,
            "finished_at": fact.finished_utc,
            "size_bytes": fact.size_bytes,
            "seconds": fact.seconds,
        }
        # A checkpoint written again at the same path replaces the earlier one.
        intake.session.execute(
            insert(CheckpointRow)
            .values(values)
            .on_conflict_do_update(
                index_elements=["job_id", "path"],
                set_=values,
                where=CheckpointRow.finished_at < fact.finished_utc,
            )
        )
        if fact.asked > job.checkpoints_answered:
            job.checkpoints_answered = fact.asked
            intake.changed.add(job.job_id)
        keep = int((job.spec.get("checkpoint") or {}).get("keep", 2))
        _forget_old_checkpoints(intake.session, fact.job_id, keep=max(keep, 1))


def _forget_old_checkpoints(session: Session, job_id: str, *, keep: int) -> None:
    """The agents delete all but the newest `keep` checkpoints; a restart must not use a deleted one."""
    kept = (
        select(CheckpointRow.path)
        .where(CheckpointRow.job_id == job_id)
        .order_by(CheckpointRow.step.desc(), CheckpointRow.finished_at.desc())
        .limit(keep)
    )
    session.execute(
        delete(CheckpointRow)
        .where(CheckpointRow.job_id == job_id, CheckpointRow.path.not_in(kept))
        .execution_options(synchronize_session=False)
    )


def _store_finished(intake: Intake) -> None:
    for fact in intake.report.finished:
        job = intake.jobs.get(fact.job_id)
        # A suspended job has no ranks: this is an old ending of a job that was resumed since.
        over = job is None or job.state in (*ENDED, JobState.SUSPENDED)
        # A generation above the active one was made by a handoff whose last report is still on its way.
        if job is None or over or fact.generation < (job.active_generation or 0):
            continue
        _advance(intake, job, generation=job.active_generation or 0, step=fact.step)
        if fact.failed is not None:
            rank = fact.failed.rank
            close_generation(intake.session, job, FirstCause(FailedPart.RANK, None, rank, step=fact.step))
            set_state(job, JobState.FAILED, fact.failed.text, now=intake.now)
        elif job.state == JobState.STOPPING:
            set_state(job, JobState.STOPPED, f"stopped on request at step {fact.step}", now=intake.now)
        elif job.state == JobState.SUSPENDING:
            continue
        else:
            set_state(job, JobState.FINISHED, f"stop condition met at step {fact.step}", now=intake.now)
        intake.changed.add(job.job_id)


def _note_errors(intake: Intake, news: set[tuple[str, int, str]]) -> None:
    """When the first rank of a job's world failed; and how one ended, for an attempt that others say it ended."""
    for rank in intake.report.ranks:
        job = intake.jobs.get(rank.job_id)
        if job is None or rank.stage not in LOST or _standing(rank.job_id, rank.rank, rank.stage) not in news:
            continue
        if job.error_at is None and rank.generation == job.active_generation:
            job.error_at = intake.now
        cause = cause_of_rank(intake.node.node_id, rank.rank, rank.step, rank.reason.text if rank.reason else "")
        if not cause.is_felt:
            name_cause(intake.session, job.job_id, cause, now=intake.now)


def _account(intake: Intake, lease: LeaseRow) -> None:
    """Continue the ledger of each slot of this node up to now."""
    by_slot = {rank.slot: rank for rank in sorted(intake.report.ranks, key=attrgetter("generation"))}
    spent: list[Spent] = []
    for slot in range(lease.slots):
        rank = by_slot.get(slot)
        job = intake.jobs.get(rank.job_id) if rank is not None else None
        if rank is None or job is None:
            spent.append(Spent(Cause.IDLE))
        else:
            row = intake.generation(job.job_id, rank.generation)
            facts = SlotFacts(
                stage=rank.stage,
                generation=rank.generation,
                active_generation=job.active_generation,
                from_checkpoint=row is not None and row.checkpoint_path is not None,
                step=rank.step,
                repeats_until=row.repeats_until if row is not None else 0,
            )
            cause = cause_of(facts)
            generation = rank.generation if row is not None else None
            spent.append(Spent(cause) if cause is Cause.IDLE else Spent(cause, job.job_id, generation))
    account_all(intake.session, lease=lease, until=intake.now, spent=spent)


def _wake(intake: Intake, *, all_jobs: bool) -> None:
    """Wake the agents of jobs whose orders changed and the reconcilers of jobs whose facts changed."""
    session, now = intake.session, intake.now
    for job_id in sorted(intake.changed):
        refresh_members(session, intake.jobs[job_id])
        touch(session, intake.jobs[job_id], now=now)
    for job_id in sorted((intake.due - intake.changed) & intake.jobs.keys()):
        job = intake.jobs[job_id]
        if job.state not in ENDED:
            job.due_at = now
            intake.watched.add(job_id)
    notify(session, map(job_topic, sorted(intake.watched - intake.changed)))
    if all_jobs:
        # A node joined or changed: any job may want it. Rows that are locked elsewhere are skipped, since waiting for
        # them here could deadlock; their reconciler looks again within seconds anyway.
        waiting = select(JobRow.job_id).where(JobRow.due_at.is_not(None), JobRow.job_id.not_in(intake.jobs))
        found = session.scalars(waiting.order_by(JobRow.job_id).with_for_update(skip_locked=True, key_share=True)).all()
        session.execute(
            update(JobRow)
            .where(JobRow.job_id.in_(found))
            .values(due_at=now)
            .execution_options(synchronize_session=False)
        )
        notify(session, [RECONCILERS])


def _standing(job_id: str, rank: int, stage: str) -> tuple[str, int, str]:
    """What the reconciler needs to know of a rank: that it exists, and whether it has ended."""
    over = (RankStage.FAILED, RankStage.BROKEN, RankStage.LEFT, RankStage.FINISHED, RankStage.ABORTED)
    return job_id, rank, stage if stage in over else "alive"
