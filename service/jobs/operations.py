"""What changes a job: submitting, stopping, starting a generation, activating one by compare-and-set."""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from posixpath import normpath
from uuid import UUID, uuid4

from sqlalchemy import bindparam, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile import JobFile
from agent.protocol.values import Placement
from liver_core.handoff.generations import next_start
from liver_core.layout import Roster
from service.db.base import ORDERS_SEQUENCE, Json, among
from service.db.roster_rows import stored_roster
from service.db.wake import SENDING, job_topic, node_topic, notify
from service.incidents.operations import settle_all
from service.jobs.causes import FirstCause, at_store
from service.jobs.checkpoints import go_back
from service.jobs.grants import end_grants, follow_members
from service.jobs.tables import (
    ENDED,
    RANDOM_PART_CHARS,
    GenerationRow,
    JobGrantRow,
    JobMemberRow,
    JobRow,
    JobState,
    MemberRole,
    SourceKind,
)
from service.jobs.view import Checkpoint
from service.nodes.tables import NodeRow
from service.planner.feasibility import rule_violations
from service.problems import conflict, invalid, not_found

SOON = timedelta(seconds=2)
LOCK_PATHS = 0x11FE_0007
ALL_WOKEN_UP_TO_NODES = 64
"""For what can wait, the nodes of a larger job are not woken, and its orders get no number: who is woken reports at
once, and where a thousand do, and each report finds orders that have to be made, the next change comes first."""
_LOCK = (
    select(JobRow)
    .where(JobRow.job_id == bindparam("job_id"))
    .with_for_update(key_share=True)
    .execution_options(populate_existing=True)
)
_LOCK_MANY = (
    select(JobRow)
    .where(among(JobRow.job_id, "job_ids"))
    .order_by(JobRow.job_id)
    .with_for_update(key_share=True)
    .execution_options(populate_existing=True)
)
# A job's members are some thousands at most: one statement numbers their orders and wakes them all.
_TOUCH = text(
    """
    WITH size AS (SELECT :is_urgent OR count(*) <= :all_up_to AS is_told FROM job_members WHERE job_id = :job_id),
         topics AS (SELECT 0 AS number, CAST(:job_topic AS text) AS topic
                    UNION ALL
                    SELECT row_number() OVER (ORDER BY node_id), :node_topic || node_id
                      FROM job_members, size WHERE is_told AND job_id = :job_id AND node_id <> :asker),
         sent AS (SELECT pg_notify(:channel, string_agg(topic, ',' ORDER BY number)) AS done
                    FROM topics GROUP BY number / :topics_max)
    SELECT CASE WHEN is_told THEN nextval('orders_seq') END FROM size, (SELECT count(done::text) FROM sent) AS all_sent
    """
)
_NOTE_UNMADE = text(
    """
    WITH free AS MATERIALIZED (
         SELECT jobs.job_id, said.because
           FROM unnest(CAST(:job_ids AS text[]), CAST(:because AS text[])) AS said (job_id, because)
           JOIN jobs ON jobs.job_id = said.job_id AND (jobs.due_at IS NOT NULL OR said.because = '')
          ORDER BY jobs.job_id FOR NO KEY UPDATE OF jobs SKIP LOCKED)
    UPDATE jobs SET no_orders_because = free.because FROM free WHERE jobs.job_id = free.job_id
    """
)
_MEMBERS = select(JobMemberRow.node_id).where(among(JobMemberRow.job_id, "job_ids"))


@dataclass(frozen=True, slots=True)
class Birth:
    """Where a generation comes from."""

    origin_id: UUID
    source: SourceKind
    reason: str
    checkpoint: Checkpoint | None = None
    lost_steps: int = 0
    repeats_until: int = 0
    steps_from_at: datetime | None = None


def submit_job(session: Session, job_file: JobFile, *, now: datetime) -> JobRow:
    """Register a job. Raises 422, and stores nothing, if layout rules cannot work, or another job that has not ended
    writes its checkpoints there; it names each field."""
    problems = tuple(FieldProblem(field=item.field, rule=item.rule) for item in rule_violations(job_file))
    if problems:
        raise invalid(*problems)
    _check_path_is_free(session, job_file)
    job = JobRow(
        job_id=f"{job_file.name[:54]}-{secrets.token_hex(RANDOM_PART_CHARS // 2)}",
        name=job_file.name,
        spec=job_file.model_dump(mode="json", exclude_none=True),
        peer_key=secrets.token_urlsafe(32),
        peer_key_at=now,
        state=JobState.PENDING,
        reason="submitted",
        created_at=now,
        state_changed_at=now,
        due_at=now,
    )
    session.add(job)
    session.flush()
    touch(session, job, now=now)
    return job


def _check_path_is_free(session: Session, job_file: JobFile) -> None:
    """Raises 422 if another job that has not ended has this checkpoint.path."""
    if job_file.checkpoint is not None and (other := _who_writes_to(session, job_file.checkpoint.path)):
        rule = f"must be a path of its own: job {other}, which has not ended, writes its checkpoints there"
        raise invalid(FieldProblem(field="checkpoint.path", rule=rule))


def _who_writes_to(session: Session, path: str) -> str | None:
    """The job that has not ended and has this checkpoint.path, if any: two would remove what the other one writes."""
    wanted = normpath(path)
    session.execute(select(func.pg_advisory_xact_lock(LOCK_PATHS, func.hashtext(wanted))))
    used = JobRow.spec["checkpoint"]["path"].as_string()
    paths = session.execute(select(JobRow.job_id, used).where(JobRow.state.not_in(ENDED)))
    return next((job_id for job_id, other in paths if other is not None and normpath(other) == wanted), None)


def request_stop(session: Session, job_id: str, *, now: datetime) -> JobRow:
    """Ask a job to stop; asking again changes nothing. Raises 404, or 409 if it has ended another way."""
    job = lock_job(session, job_id)
    if job.state in ENDED and job.state != JobState.STOPPED:
        raise conflict(f"job {job_id} has already ended: it is {job.state}")
    if job.stop_requested_at is None:
        job.stop_requested_at = now
        touch(session, job, now=now)
    return job


def pause_job(session: Session, job_id: str, *, who: str, now: datetime) -> JobRow:
    """Let the job's ranks end after a checkpoint, and start none until it is resumed; asking again changes nothing.
    Raises 404, or 409 if it has ended or ends, or if all its steps would be lost."""
    job = lock_job(session, job_id)
    if job.state in ENDED or job.stop_requested_at is not None:
        raise conflict(f"job {job_id} has ended or is about to: it is {job.state}")
    if job.spec.get("checkpoint") is None and job.state not in (JobState.PENDING, JobState.SUSPENDED):
        raise conflict(f"job {job_id} would lose every step: its job file has no checkpoint.path to continue from")
    if not job.paused_because:
        job.paused_because = f"{who} asked for a pause"
        touch(session, job, now=now)
    return job


def request_checkpoint(session: Session, job_id: str, *, now: datetime) -> JobRow:
    """Ask for a checkpoint at the next step. While one is asked for, asking again changes nothing. Raises 404, or 409
    if the job cannot write one."""
    job = lock_job(session, job_id)
    if job.spec.get("checkpoint") is None:
        raise conflict(f"job {job_id} has no place for checkpoints: its job file has no checkpoint.path")
    if job.state != JobState.RUNNING:
        raise conflict(f"job {job_id} is {job.state}: only a running job can write a checkpoint")
    if not job.awaits_checkpoint:
        job.checkpoints_asked += 1
        touch(session, job, now=now)
    return job


def resume_job(
    session: Session,
    job_id: str,
    checkpoint: Checkpoint | None,
    *,
    steps: int | None,
    goes_back: bool = False,
    now: datetime,
) -> JobRow:
    """Continue a job that was paused, or one that has ended from this checkpoint, up to `steps` if given. `goes_back`:
    the checkpoint was chosen, so that later ones are left behind. Raises 404 or 409."""
    job = lock_job(session, job_id)
    if job.state not in ENDED and job.paused_because:
        if steps is not None:
            raise conflict(f"job {job_id} is paused and not ended: change its stop.steps, and then resume it")
        if goes_back and job.state not in (JobState.PENDING, JobState.SUSPENDED):
            raise conflict(f"job {job_id} is {job.state}: its ranks have not ended yet; resume it when it is suspended")
        if goes_back and checkpoint is not None:
            _check_that_steps_are_left(
                job_id, checkpoint, int(job.spec["stop"]["steps"]), "change its stop.steps first"
            )
            go_back(job, checkpoint.step)
        job.paused_because = ""
        touch(session, job, now=now)
        return job
    if job.state not in ENDED:
        raise conflict(f"job {job_id} has not ended: it is {job.state}, and not paused")
    if checkpoint is None:
        raise conflict(f"job {job_id} has no checkpoint to continue from; submit it again to start from its beginning")
    last = steps or int(job.spec["stop"]["steps"])
    _check_that_steps_are_left(job_id, checkpoint, last, "give more steps")
    rule = job.spec.get("checkpoint")
    if rule is not None and (other := _who_writes_to(session, rule["path"])):
        raise conflict(f"job {job_id} cannot be resumed: job {other}, which has not ended, writes to {rule['path']}")
    if goes_back:
        go_back(job, checkpoint.step)
    job.spec = {**job.spec, "stop": {"steps": last}}
    job.stop_requested_at, job.failed_starts, job.crashes, job.suspended_because = None, 0, {}, ""
    job.paused_because = ""
    job.checkpoints_answered = job.checkpoints_asked
    set_state(
        session, job, JobState.SUSPENDED, f"resume requested, from the checkpoint of step {checkpoint.step}", now=now
    )
    touch(session, job, now=now)
    return job


def _check_that_steps_are_left(job_id: str, checkpoint: Checkpoint, last: int, advice: str) -> None:
    if checkpoint.step >= last:
        raise conflict(f"job {job_id} has a checkpoint of step {checkpoint.step} and stops after step {last}: {advice}")


def lock_job(session: Session, job_id: str) -> JobRow:
    """The job's row, locked until the end of the transaction. Raises 404."""
    job = session.scalars(_LOCK, {"job_id": job_id}).one_or_none()
    if job is None:
        raise not_found("job", job_id)
    return job


def lock_jobs(session: Session, job_ids: Collection[str]) -> Sequence[JobRow]:
    """The rows of these jobs, without their plans, locked in order of id. One that is deleted is left out."""
    return session.scalars(_LOCK_MANY, {"job_ids": sorted(job_ids)}).all()


def set_state(session: Session, job: JobRow, state: JobState, reason: str, *, now: datetime) -> None:
    """Set the state and its reason. An ended job is never due again, and nothing goes wrong with it any more."""
    if job.state != state:
        job.state = state
        job.state_changed_at = now
        job.no_orders_because = ""  # Other orders follow, if any; what is wrong with those is noted anew.
    job.reason, job.standstill = reason, None
    if state in ENDED:
        job.due_at = None
        settle_all(session, job, at=now)


def touch(session: Session, job: JobRow, *, now: datetime, asker: str = "", is_urgent: bool = True) -> None:
    """The job's orders have changed: give them a new number, wake its agents and the reconcilers. `asker`: a node that
    gets them in the answer that it waits for, and is not woken. Where it is not urgent, those of a large job have it in
    the answer to a report some seconds later (`service.sync.answers`), and only its watchers and reconcilers are woken.
    """
    values = {"job_topic": job_topic(job.job_id), "node_topic": node_topic(""), "job_id": job.job_id, "asker": asker}
    values |= {"is_urgent": is_urgent, "all_up_to": ALL_WOKEN_UP_TO_NODES}
    number = session.execute(_TOUCH, values | SENDING).scalar_one()
    if number is not None:
        job.orders_seq = number
    if job.state not in ENDED:
        job.due_at = now


def touch_all(session: Session, urgent: Mapping[str, bool], *, now: datetime) -> None:
    """As `touch`, for any number of jobs with as many statements as for one. Locks them, in order of id. Where it is
    not `urgent`, agents find the change in the answer to their next report, and the reconcilers look `SOON` after."""
    if not urgent:
        return
    jobs = lock_jobs(session, urgent.keys())
    numbers = select(ORDERS_SEQUENCE.next_value()).select_from(func.generate_series(1, len(jobs)))
    for job, number in zip(jobs, session.scalars(numbers).all(), strict=True):
        job.orders_seq = number
        if job.state not in ENDED:
            due_at = now if urgent[job.job_id] else now + SOON
            job.due_at = due_at if job.due_at is None else min(job.due_at, due_at)
    woken = [job.job_id for job in jobs if urgent[job.job_id]]
    nodes = session.scalars(_MEMBERS, {"job_ids": woken}).all() if woken else ()
    notify(session, [*(job_topic(job.job_id) for job in jobs), *(node_topic(node_id) for node_id in nodes)])


def end_part(session: Session, node_id: str, *, now: datetime) -> None:
    """The node has no part in any job from now on: it gets no orders, and nothing is believed that it says. Locks the
    jobs that it had a part in, and wakes them."""
    granted = select(JobGrantRow.job_id).where(JobGrantRow.node_id == node_id, JobGrantRow.role.is_not(None))
    member = select(JobMemberRow.job_id).where(JobMemberRow.node_id == node_id)
    job_ids = set(session.scalars(granted.union(member)))
    if not job_ids:
        return
    for job in lock_jobs(session, job_ids):
        plans = [plan for plan in job.standing_plans if not _names(plan, node_id)]
        spares = [name for name in job.spares if name != node_id]
        if (plans, spares) != (job.standing_plans, job.spares):
            job.standing_plans, job.spares = plans, spares
    end_grants(session, node_id, now=now)
    session.execute(delete(JobMemberRow).where(JobMemberRow.node_id == node_id))
    touch_all(session, dict.fromkeys(job_ids, True), now=now)


def _names(plan: Json, node_id: str) -> bool:
    members = (plan.get("target") or {}).get("members", ())
    return any(member["node_id"] == node_id for member in members)


def start_generation(session: Session, job: JobRow, target: Placement, birth: Birth, *, now: datetime) -> GenerationRow:
    """Begin a new start of the job: a world from initialisation or a checkpoint. Make it active."""
    number, parent = next_start(job.next_generation - 1), job.active_generation
    roster = Roster(job_id=job.job_id, generation=number, layout=target.layout, members=target.members)
    birth = replace(birth, repeats_until=job.highest_step)
    row = add_generation(session, job, roster, birth, parent=parent, now=now)
    row.store_node = roster.node_ids()[0]  # Decided once: agents that choose by what each has heard start two.
    if not activate(session, job, expected=parent, generation=number):
        raise conflict(f"job {job.job_id}: generation {parent} is no longer active")
    job.last_step = birth.checkpoint.step if birth.checkpoint else 0
    job.last_step_at = None
    job.lost_steps += birth.lost_steps
    job.suspended_because, job.error_at = "", None
    set_state(session, job, JobState.STARTING, birth.reason, now=now)
    job.state_changed_at = now
    return row


def add_generation(
    session: Session, job: JobRow, roster: Roster, birth: Birth, *, parent: int | None, now: datetime
) -> GenerationRow:
    """Store a generation. Its number is used from now on, even if the generation fails."""
    row = GenerationRow(
        job_id=job.job_id,
        generation=roster.generation,
        origin_id=birth.origin_id,
        parent=parent,
        source_kind=birth.source,
        checkpoint_path=birth.checkpoint.path if birth.checkpoint else None,
        checkpoint_step=birth.checkpoint.step if birth.checkpoint else None,
        layout=str(roster.layout),
        nodes=len(roster.node_ids()),
        roster=stored_roster(roster),
        reason=birth.reason,
        lost_steps=birth.lost_steps,
        repeats_until=birth.repeats_until,
        steps_from_at=birth.steps_from_at,
        created_at=now,
    )
    burn(job, roster.generation)
    session.add(row)
    session.flush()
    return row


def close_generation(session: Session, job: JobRow, cause: FirstCause | None) -> None:
    """Store what ended the job's world. The first cause that is known stays."""
    if cause is None or job.active_generation is None:
        return
    row = session.get_one(GenerationRow, (job.job_id, job.active_generation))
    if row.ended_by is None:
        row.ended_by = (cause if cause.node else at_store(cause, row.store_node)).as_json()


def burn(job: JobRow, generation: int) -> None:
    """Mark a generation number as used, so that it is never assigned again."""
    job.next_generation = max(job.next_generation, generation + 1)


def note_unmade(session: Session, because: Mapping[str, str]) -> None:
    """Why no order can be made of what is stored of these jobs; empty where one can be made again. Never waits for a
    lock: it is found out again."""
    session.execute(_NOTE_UNMADE, {"job_ids": list(because), "because": list(because.values())})


def activate(session: Session, job: JobRow, *, expected: int | None, generation: int) -> bool:
    """Compare-and-set of the job's active generation. False, and nothing changed, if another one is active. What was
    planned for the one before is over."""
    session.flush()
    changed = session.execute(
        update(JobRow)
        .where(JobRow.job_id == job.job_id, JobRow.active_generation.is_not_distinct_from(expected))
        .values(active_generation=generation, suspends_at=None)
        .returning(JobRow.job_id)
        .execution_options(synchronize_session=False)
    ).scalar_one_or_none()
    session.refresh(job, ["active_generation", "suspends_at"])
    return changed is not None


def set_members(session: Session, job: JobRow, roles: dict[str, MemberRole], *, now: datetime) -> None:
    """Replace the job's members, and note what was granted or taken back. Leaves out unknown nodes and nodes that work
    for another job."""
    known = set(session.scalars(select(NodeRow.node_id).where(NodeRow.node_id.in_(list(roles)))))
    wanted = {node_id: role for node_id, role in roles.items() if node_id in known}
    mine = select(JobMemberRow.node_id, JobMemberRow.role).where(JobMemberRow.job_id == job.job_id)
    present = {row.node_id: row.role for row in session.execute(mine.with_for_update())}
    leaving = [node_id for node_id, role in present.items() if wanted.get(node_id) != role]
    if leaving:
        session.execute(
            delete(JobMemberRow)
            .where(JobMemberRow.job_id == job.job_id, JobMemberRow.node_id.in_(leaving))
            .execution_options(synchronize_session=False)
        )
        notify(session, (node_topic(node_id) for node_id in leaving))
    added = [node_id for node_id, role in sorted(wanted.items()) if node_id not in present or node_id in leaving]
    given: dict[str, MemberRole] = {}
    if added:
        rows = [{"job_id": job.job_id, "node_id": node_id, "role": wanted[node_id].value} for node_id in added]
        stored = insert(JobMemberRow).values(rows).on_conflict_do_nothing().returning(JobMemberRow.node_id)
        given = {node_id: wanted[node_id] for node_id in session.scalars(stored)}
    follow_members(session, job.job_id, given=given, taken=set(leaving) - given.keys(), now=now)


def member_roles(
    *, members: Iterable[str], targets: Iterable[str] = (), spares: Iterable[str] = ()
) -> dict[str, MemberRole]:
    """Each node's strongest role."""
    roles = dict.fromkeys(spares, MemberRole.SPARE)
    roles |= dict.fromkeys(targets, MemberRole.TARGET)
    return roles | dict.fromkeys(members, MemberRole.MEMBER)


def new_birth(source: SourceKind, reason: str, *, checkpoint: Checkpoint | None = None, lost_steps: int = 0) -> Birth:
    """The birth of a generation that the service starts."""
    return Birth(uuid4(), source, reason, checkpoint=checkpoint, lost_steps=lost_steps)
