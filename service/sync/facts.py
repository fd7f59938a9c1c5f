"""Stores what is said once: steps, logs, metrics, checkpoints and endings. The caller knows that it may be said."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import and_, case, delete, func, null, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.sync import CheckpointFact, JobFinished, LogChunk, MetricsRow, RankStatus, StepRow
from liver_core.handoff import RankStage
from service.handoffs.operations import drop_proposals
from service.handoffs.tables import HandoffRow
from service.incidents.operations import add_lost, record, settle
from service.incidents.tables import IncidentKind
from service.jobs.causes import FailedPart, FirstCause
from service.jobs.checkpoints import note_damage
from service.jobs.operations import burn, close_generation, set_state
from service.jobs.tables import ENDED, CheckpointRow, GenerationRow, JobRow, JobState, SourceKind
from service.metrics.operations import store_metrics
from service.sync.intake import Intake
from service.sync.reach import GENERATIONS_AHEAD_MAX

# Rows come as one array per column: one statement for any number of rows, compiled and prepared once. Several ranks
# report one step, and each knows only part of it: a later row fills the empty columns of an earlier one. One that says
# nothing more is left out: a row in conflict is locked in any case, and all nodes of a job would wait for each other.
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
           AS said (job_id, generation, step, seconds, loss, consumed_samples, sample_digest, tokens, finished_at)
     WHERE NOT EXISTS (
           SELECT FROM steps AS known
            WHERE (known.job_id, known.generation, known.step) = (said.job_id, said.generation, said.step)
              AND (said.loss IS NULL OR known.loss IS NOT NULL)
              AND (said.consumed_samples IS NULL OR known.consumed_samples IS NOT NULL)
              AND (said.sample_digest IS NULL OR known.sample_digest IS NOT NULL)
              AND (said.tokens IS NULL OR known.tokens IS NOT NULL))
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
_STEP_COLUMNS = {
    name: name
    for name in ("job_id", "generation", "step", "seconds", "loss", "consumed_samples", "sample_digest", "tokens")
} | {"finished_at": "finished_utc"}
_PARTLY_KNOWN = ("loss", "consumed_samples", "sample_digest", "tokens")
_LOG_COLUMNS = {
    "log_job_id": "job_id",
    "log_generation": "generation",
    "log_rank": "rank",
    "log_start_offset": "offset",
}


class Facts(NamedTuple):
    """Of jobs that are locked. `late_steps`: those among the steps that waited, with the node that reported each."""

    steps: Sequence[StepRow] = ()
    logs: Sequence[LogChunk] = ()
    checkpoints: Sequence[CheckpointFact] = ()
    finished: Sequence[JobFinished] = ()
    late_steps: Sequence[tuple[str, StepRow]] = ()
    metrics: Sequence[MetricsRow] = ()


def store_facts(intake: Intake, facts: Facts) -> None:
    """Store them in this order: the last step comes before the end."""
    with intake.session.no_autoflush:
        # The job's row is locked before those of its steps.
        _note_progress(intake, facts.steps)
        store_rows(intake.session, facts.steps, facts.logs, now=intake.now)
    store_metrics(intake.session, facts.metrics)
    _store_checkpoints(intake, facts.checkpoints)
    _store_finished(intake, facts.finished)


def store_rows(session: Session, steps: Sequence[StepRow], logs: Sequence[LogChunk], *, now: datetime) -> None:
    """Store steps and logs. Of a step that comes twice the later row counts, and the earlier one where that says
    nothing."""
    if steps or logs:
        unique: dict[tuple[str, int, int], StepRow] = {}
        for step in steps:
            key = (step.job_id, step.generation, step.step)
            unique[key] = _filled(step, unique[key]) if key in unique else step
        # In one order: reports of several nodes at once must not wait for each other in a circle.
        unique = dict(sorted(unique.items()))
        values = {name: [getattr(step, part) for step in unique.values()] for name, part in _STEP_COLUMNS.items()}
        values |= {name: [getattr(chunk, part) for chunk in logs] for name, part in _LOG_COLUMNS.items()}
        values["log_text"] = [chunk.text.replace("\x00", "") for chunk in logs]
        session.execute(_ADD_ROWS, values | {"now": now})


def _filled(step: StepRow, earlier: StepRow) -> StepRow:
    """The step with what only the earlier row of it says."""
    missing = {name: getattr(earlier, name) for name in _PARTLY_KNOWN if getattr(step, name) is None}
    return step.model_copy(update=missing) if missing else step


def _note_progress(intake: Intake, steps: Sequence[StepRow]) -> None:
    """Ranks also report their step, so that a job's progress is known even if step rows come late."""
    last: dict[tuple[str, int], int] = {}
    for step in steps:
        key = (step.job_id, step.generation)
        last[key] = max(step.step, last.get(key, 0))
    for (job_id, generation), number in sorted(last.items()):
        _advance(intake, intake.jobs[job_id], generation=generation, step=number)
    for rank in intake.report.ranks:
        job = intake.jobs[rank.job_id]
        _burn_told(intake, job, rank.generation)
        if rank.reason is not None and rank.reason.cause is not None and rank.reason.cause.newer_start is not None:
            burn(job, rank.reason.cause.newer_start)  # The database was restored, and does not know of it.
        if intake.world(job.job_id, rank.generation) is None:
            continue
        _note_damage(intake, job, rank)
        if rank.step > 0 and rank.stage is not RankStage.STARTING:
            _advance(intake, job, generation=rank.generation, step=rank.step)


def _burn_told(intake: Intake, job: JobRow, generation: int) -> None:
    """Of a world that nobody else has told of, no number is used up far beyond the highest world that is known:
    whoever tells of such a world again and again uses up no more."""
    if generation < job.next_generation:
        return
    told = select(func.max(HandoffRow.generation)).where(HandoffRow.job_id == job.job_id)
    known = max(job.active_generation or 0, intake.session.scalar(told) or 0)
    burn(job, min(generation, known + GENERATIONS_AHEAD_MAX))


def _note_damage(intake: Intake, job: JobRow, rank: RankStatus) -> None:
    """Of what the present world was to begin from, where that is what its ranks ended of."""
    cause = rank.reason.cause if rank.reason is not None else None
    is_of_start = job.state == JobState.STARTING and rank.generation == job.active_generation
    row = intake.generation(job.job_id, rank.generation)
    if rank.reason is None or cause is None or cause.checkpoint is None or row is None or not is_of_start:
        return
    text = rank.ended.reported if rank.ended is not None else ""
    if note_damage(intake.session, job, row, cause.checkpoint, text or rank.reason.text, now=intake.now):
        intake.restated.add(job.job_id)


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
        job.last_step_at, job.standstill = intake.now, None
        job.highest_step = max(job.highest_step, step)
    if row is not None and row.first_step_at is None and step > begun_at:
        row.first_step_at = intake.now
    if job.state == JobState.STARTING and step > begun_at:
        set_state(intake.session, job, JobState.RUNNING, f"training since step {step}; {job.reason}", now=intake.now)
        job.failed_starts = 0
        intake.restated.add(job.job_id)


def _count_lost(intake: Intake, job: JobRow, *, generation: int, step: int) -> None:
    """The report of this step was on its way when the service replaced its world by a start, or it was made by the
    world of a handoff that had not become active by then: the step is lost too. Before such a start, the job has got as
    far as the world of that handoff."""
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
        if generation > (job.active_generation or 0) and job.state not in ENDED and step > job.last_step:
            job.last_step, job.last_step_at = step, intake.now
            job.highest_step = max(job.highest_step, step)
        return
    more = step - (successor.checkpoint_step or 0) - successor.lost_steps
    if more > 0:
        successor.lost_steps += more
        job.lost_steps += more
        add_lost(intake.session, job.job_id, successor.parent, more)
        successor.repeats_until = max(successor.repeats_until, step)
        job.highest_step = max(job.highest_step, step)
        intake.watched.add(job.job_id)


def _store_checkpoints(intake: Intake, checkpoints: Sequence[CheckpointFact]) -> None:
    for fact in checkpoints:
        job = intake.jobs[fact.job_id]
        if fact.asked > job.checkpoints_answered:
            job.checkpoints_answered = fact.asked
            intake.restated.add(job.job_id)
        if fact.failure:
            _note_failed_checkpoint(intake.session, job, fact)
            continue
        settle(intake.session, job, IncidentKind.CHECKPOINT, at=fact.finished_utc)
        values = {
            "job_id": fact.job_id,
            "path": fact.path,
            "generation": fact.generation,
            "step": fact.step,
            "finished_at": fact.finished_utc,
            "size_bytes": fact.size_bytes,
            "seconds": fact.seconds,
        }
        # One that is written again at the same path replaces the earlier one. Of one several nodes tell what they see;
        # whoever tells late of one that is damaged tells nothing new.
        is_new = CheckpointRow.damaged_in < fact.generation
        renewed = {"damage": case((is_new, null()), else_=CheckpointRow.damage)}
        renewed |= {"damaged_in": case((is_new, null()), else_=CheckpointRow.damaged_in)}
        intake.session.execute(
            insert(CheckpointRow)
            .values(values)
            .on_conflict_do_update(
                index_elements=["job_id", "path"],
                set_={name: value for name, value in values.items() if value is not None} | renewed,
                where=CheckpointRow.finished_at < fact.finished_utc,
            )
        )
        if fact.loaded:
            _begin_later(intake, job, fact)
        keep = int((job.spec.get("checkpoint") or {}).get("keep", 2))
        _forget_old_checkpoints(intake.session, fact, keep=max(keep, 1))


def _note_failed_checkpoint(session: Session, job: JobRow, fact: CheckpointFact) -> None:
    """It changes nothing of those that are complete, and says nothing where a later one has become complete."""
    same_world = and_(CheckpointRow.generation == fact.generation, CheckpointRow.step >= fact.step)
    newer = or_(same_world, CheckpointRow.finished_at >= fact.finished_utc)
    statement = select(CheckpointRow.path).where(CheckpointRow.job_id == job.job_id, newer)
    if session.scalars(statement.limit(1)).first() is None:
        told = {"at": fact.finished_utc, "reason": fact.failure, "generation": fact.generation, "step": fact.step}
        record(session, job, IncidentKind.CHECKPOINT, **told)


def _begin_later(intake: Intake, job: JobRow, fact: CheckpointFact) -> None:
    """The ranks of a start have found a later checkpoint than it was given, and begun from that."""
    row = intake.generation(job.job_id, fact.generation)
    given = row.checkpoint_step or 0 if row is not None else 0
    if row is None or row.source_kind == SourceKind.HANDOFF or fact.step <= given:
        return
    lost = max(0, given + row.lost_steps - fact.step) if row.lost_steps else 0
    words = f"; its ranks found a later checkpoint, of step {fact.step}: {lost} steps lost"
    row.source_kind, row.checkpoint_path, row.checkpoint_step = SourceKind.CHECKPOINT, fact.path, fact.step
    row.reason += words
    job.lost_steps += lost - row.lost_steps
    add_lost(intake.session, job.job_id, row.parent, lost - row.lost_steps)
    row.lost_steps = lost
    if row.generation == job.active_generation and job.state not in ENDED:
        job.last_step, job.highest_step = max(job.last_step, fact.step), max(job.highest_step, fact.step)
        job.reason += words
    intake.restated.add(job.job_id)


def _forget_old_checkpoints(session: Session, newest: CheckpointFact, *, keep: int) -> None:
    """The rank that writes one removes all but the newest `keep` up to that; a restart must not use a removed one."""
    up_to_it = (CheckpointRow.job_id == newest.job_id, CheckpointRow.step <= newest.step)
    kept = (
        select(CheckpointRow.path)
        .where(*up_to_it)
        .order_by(CheckpointRow.step.desc(), CheckpointRow.finished_at.desc())
        .limit(keep)
    )
    session.execute(
        delete(CheckpointRow)
        .where(*up_to_it, CheckpointRow.path.not_in(kept))
        .execution_options(synchronize_session=False)
    )


def _store_finished(intake: Intake, finished: Sequence[JobFinished]) -> None:
    for fact in finished:
        job = intake.jobs[fact.job_id]
        # A suspended job has no ranks: this is an old ending of a job that was resumed since.
        over = job.state in (*ENDED, JobState.SUSPENDED)
        # A generation above the active one was made by a handoff whose last report is still on its way.
        if over or fact.generation < (job.active_generation or 0):
            continue
        _advance(intake, job, generation=job.active_generation or 0, step=fact.step)
        if fact.failed is not None:
            rank = fact.failed.rank
            close_generation(intake.session, job, FirstCause(FailedPart.RANK, None, rank, step=fact.step))
            set_state(intake.session, job, JobState.FAILED, fact.failed.text, now=intake.now)
        elif job.state == JobState.STOPPING:
            set_state(intake.session, job, JobState.STOPPED, f"stopped on request at step {fact.step}", now=intake.now)
        elif job.state == JobState.SUSPENDING:
            continue
        else:
            set_state(intake.session, job, JobState.FINISHED, f"stop condition met at step {fact.step}", now=intake.now)
        drop_proposals(intake.session, job.job_id, f"the job has ended: it is {job.state}", now=intake.now)
        intake.changed.add(job.job_id)
