"""The job reconciler: claims jobs that are due, decides by the pure rule, applies it if the claim is still its own."""

import logging
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from sqlalchemy import select
from sqlalchemy.orm import Session

from liver_core.layout.limits import listed
from service.capacity.wants import store_wants
from service.context import Context
from service.db.claims import claim_due, take_back
from service.db.outage import is_outage
from service.decisions.operations import record
from service.decisions.rules import considered, decided
from service.handoffs.operations import adopt_world, drop_handoff, propose_handoff
from service.handoffs.queries import open_handoff
from service.incidents.operations import record as record_incident
from service.incidents.tables import IncidentKind
from service.jobs.membership import refresh_members
from service.jobs.operations import close_generation, new_birth, set_state, start_generation, touch
from service.jobs.queries import Situation, active_row, situation, world_of
from service.jobs.rules import lost_steps, next_action
from service.jobs.stalls import standstill
from service.jobs.tables import ENDED, JobMemberRow, JobRow, JobState, MemberRole, SourceKind
from service.jobs.view import Action, Do, JobLimits, JobView
from service.ledger.stalls import note_standstill
from service.planner.choices import Candidates
from service.planner.losses import layouts_by_count, spares, standing_plans
from service.reconcilers.calm_jobs import LOOK_AT_CALM_S, CalmJobs, LongLooks, look_again_in_s, time_changes_nothing
from service.settings import ServiceSettings

BATCH = 32
AFTER_ERROR_S = 1.0
PLANS_KEPT_MAX = 1_000
_log = logging.getLogger(__name__)


class NodesTakenError(Exception):
    """Another job got a node first; the job is decided again."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed job. `due_at` is its value at the claim: if it differs later, something has made the job due since."""

    job_id: str
    token: UUID
    due_at: datetime | None


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans that agents may act on without the service."""

    standing: list
    by_count: list
    spares: list
    digest: str


_CALM = CalmJobs()
_LONG = LongLooks()
_KEPT: dict[str, tuple[tuple[str, tuple[str, ...]], Plans]] = {}
"""What was made last for each job, and from what. One thread in a process makes plans."""


def tick(context: Context) -> int:
    """Handle each job that is due once, but those that need no look. Returns how many there were."""
    now = context.clock()
    with context.sessions.begin() as session:
        token = uuid4()
        rows = claim_due(
            session,
            JobRow,
            due=JobRow.due_at <= now,
            order_by=JobRow.due_at,
            token=token,
            now=now,
            claim_s=context.settings.claim_s,
            most=BATCH,
        )
        claims = [Claim(row.job_id, token, row.due_at) for row in rows if not _passes(row, now)]
    for claim in claims:
        began_s = time.thread_time()
        try:
            _handle(context, claim)
        except NodesTakenError as error:
            _log.info("job %s: %s, retry in %.0f s", claim.job_id, error, AFTER_ERROR_S)
            _retry_later(context, claim)
        except Exception as error:
            if is_outage(error):
                raise
            # An error in one job must not stop the others.
            _log.exception("job %s: reconciling failed, retry in %.0f s", claim.job_id, AFTER_ERROR_S)
            _retry_later(context, claim)
        _LONG.note(claim.job_id, time.thread_time() - began_s, time.monotonic())
    return len(claims)


def _passes(row: JobRow, now: datetime) -> bool:
    rest_s = _LONG.rest_s(row.job_id, time.monotonic())
    if rest_s > 0.0:
        row.due_at = now + timedelta(seconds=rest_s)
    elif not _CALM.passes(row, now=now, due_at=now + timedelta(seconds=LOOK_AT_CALM_S)):
        return False
    row.claim_token, row.claim_expires_at = None, None
    return True


def _retry_later(context: Context, claim: Claim) -> None:
    with context.sessions.begin() as session:
        row = take_back(session, JobRow, key=JobRow.job_id == claim.job_id, token=claim.token)
        if row is not None and row.due_at is not None:
            row.due_at = context.clock() + timedelta(seconds=AFTER_ERROR_S)


def _handle(context: Context, claim: Claim) -> None:
    limits = limits_of(context.settings)
    now = context.clock()
    with context.sessions() as session:
        # All facts are of one moment.
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        job = session.get_one(JobRow, claim.job_id)
        seen = (job.state, job.active_generation, job.orders_seq)
        facts = situation(session, job, poll_s=context.settings.agent_poll_s, now=now)
    view = replace(facts.view, listening_since=context.listening.since)
    action, found = next_action(view, limits), standstill(view)
    plans = _plans(facts) if action.do is Do.NOTHING else None
    with context.sessions.begin() as session:
        row = take_back(session, JobRow, key=JobRow.job_id == claim.job_id, token=claim.token)
        if row is None:
            return
        if (row.state, row.active_generation, row.orders_seq) != seen:
            row.due_at = now
            return
        _schedule(row, claim, action, now=now)
        note_standstill(session, row, found, now=now)
        if plans is not None:
            _store_plans(session, row, plans, now=now)
        record(session, row, decided(facts, action), now=now)
        _store_wants(session, facts, action, now=now)
        _note_loss(session, row, facts.view, action, now=now)
        apply_action(session, row, action, plan_digest=facts.inputs.digest(), now=now)
        is_calm = row.state == JobState.RUNNING and time_changes_nothing(facts, action)
    _CALM.note(row, is_calm=is_calm)


def _note_loss(session: Session, job: JobRow, view: JobView, action: Action, *, now: datetime) -> None:
    """A world that ends although nobody announced it is an incident. What was announced is one already."""
    cause = action.cause
    if action.do is Do.NOTHING or cause is None or cause.node in {item.node_id for item in view.leaving}:
        return
    told = {"at": now, "reason": action.reason, "generation": job.active_generation, "step": view.last_step}
    where = {"node_id": cause.node, "rank": cause.rank}
    kind = IncidentKind.HANG if action.is_hang else IncidentKind.LOSS
    record_incident(session, job, kind, lost_steps=lost_steps(view), **told, **where)


def _store_wants(session: Session, facts: Situation, action: Action, *, now: datetime) -> None:
    """What its policy wants is asked for as long as the job should run."""
    policy, view = facts.inputs.job.policy, facts.view
    if policy is None:
        return
    is_over = action.state in ENDED or view.state in ENDED or view.stop_requested
    wanted = considered(facts).decision.wanted
    wants = () if is_over or view.paused_because or view.overspent or wanted is None else wanted.pools
    store_wants(session, facts.job_id, wants, acquire_s=policy.acquire_s, now=now)


def apply_action(session: Session, job: JobRow, action: Action, *, plan_digest: str, now: datetime) -> None:
    """Apply one action in the caller's transaction."""
    if action.do is not Do.NOTHING:
        _log.info("job %s: %s: %s", job.job_id, action.do, action.reason)
        close_generation(session, job, action.cause)
    match action.do:
        case Do.NOTHING:
            if job.state in (JobState.PENDING, JobState.SUSPENDED) and job.reason != action.reason:
                _log.info("job %s: %s", job.job_id, action.reason)
                job.reason = action.reason
            return
        case Do.START:
            _start(session, job, action, now=now)
        case Do.PROPOSE:
            if open_handoff(session, job.job_id) is None:
                propose_handoff(session, job, action, plan_digest=plan_digest, now=now)
        case Do.DROP_HANDOFF:
            _drop_open(session, job, action, now=now)
        case Do.ADOPT_WORLD:
            assert action.generation is not None
            if (world := world_of(session, job.job_id, action.generation)) is not None:
                adopt_world(session, job, world, action.reason, now=now)
        case Do.SUSPEND:
            _drop_open(session, job, action, now=now)
            set_state(session, job, JobState.SUSPENDING, action.reason, now=now)
            job.suspended_because = action.suspended_because
        case Do.SUSPEND_LATER:
            pass
        case Do.SETTLE:
            assert action.state is not None
            if action.state in ENDED or action.state is JobState.STOPPING:
                _drop_open(session, job, action, now=now)
            set_state(session, job, action.state, action.reason, now=now)
    # Whatever else is done calls a planned suspension off.
    job.suspends_at = action.suspends_at
    job.failed_starts += action.failed_start
    job.checkpoints_asked += action.save
    if action.crashes is not None:
        job.crashes = action.crashes.as_json()
    refresh_members(session, job, now=now)
    if action.target is not None:
        _check_members(session, job, action)
    touch(session, job, now=now)


def limits_of(settings: ServiceSettings) -> JobLimits:
    """The waits of the job rule, from the settings of the same names."""
    return JobLimits(**{name: getattr(settings, name) for name in JobLimits.__dataclass_fields__})


def _start(session: Session, job: JobRow, action: Action, *, now: datetime) -> None:
    assert action.target is not None
    _drop_open(session, job, action, reason=f"the job starts again: {action.reason}", now=now)
    source = SourceKind.CHECKPOINT if action.checkpoint else SourceKind.INIT
    birth = new_birth(source, action.reason, checkpoint=action.checkpoint, lost_steps=action.lost_steps)
    if action.steps_after_s:
        birth = replace(birth, steps_from_at=now + timedelta(seconds=action.steps_after_s))
    start_generation(session, job, action.target, birth, now=now)
    job.standing_plans, job.spares = [], []


def _drop_open(session: Session, job: JobRow, action: Action, *, reason: str = "", now: datetime) -> None:
    """What ends its world ends an attempt that agents have opened, too."""
    world = active_row(session, job) if action.cause is not None else None
    while (row := open_handoff(session, job.job_id)) is not None:
        if row.generation is not None and row.ended_by is None and world is not None:
            row.ended_by = world.ended_by
        drop_handoff(row, reason or action.reason, now=now)
        session.flush()


def _check_members(session: Session, job: JobRow, action: Action) -> None:
    """Raises NodesTakenError, which rolls the transaction back, if another job took one of the target's nodes."""
    assert action.target is not None
    statement = select(JobMemberRow.node_id).where(
        JobMemberRow.job_id == job.job_id, JobMemberRow.role != MemberRole.SPARE
    )
    missing = set(action.target.node_ids()) - set(session.scalars(statement))
    if missing and action.do in (Do.START, Do.PROPOSE):
        raise NodesTakenError(f"another job took nodes {listed(sorted(missing))}")


def _plans(facts: Situation) -> Plans:
    """Standing plans for every single loss, and layouts by node count, as the agents get them. They are made anew only
    for other inputs: a plan for each of a thousand nodes takes long."""
    digest, job_id = facts.inputs.digest(), facts.job_id
    going = tuple(item.node_id for item in facts.view.leaving)
    kept = _KEPT.pop(job_id, None)
    if kept is None or kept[0] != (digest, going):
        kept = (digest, going), _made_plans(facts, going, digest)
    while len(_KEPT) >= PLANS_KEPT_MAX:
        del _KEPT[next(iter(_KEPT))]
    _KEPT[job_id] = kept
    return kept[1]


def _made_plans(facts: Situation, going: tuple[str, ...], digest: str) -> Plans:
    known = Candidates.of(facts.inputs)
    standing = standing_plans(facts.inputs, known)
    if going:
        # While notices are open, the inputs lack the nodes that will go. So a plan for one more loss covers them all.
        standing = tuple(
            plan.model_copy(update={"leaving": tuple(dict.fromkeys((*going, *plan.leaving)))}) for plan in standing
        )
        standing = tuple({plan.leaving: plan for plan in standing}.values())
    by_count = layouts_by_count(facts.inputs, known)
    return Plans(
        standing=[plan.model_dump(mode="json") for plan in standing],
        by_count=[choice.model_dump(mode="json") for choice in by_count],
        spares=list(spares(facts.inputs)),
        digest=digest,
    )


def _store_plans(session: Session, job: JobRow, plans: Plans, *, now: datetime) -> None:
    """Store the plans and wake the agents if more than reasons changed: the seconds predicted there always change."""
    if job.state not in (JobState.STARTING, JobState.RUNNING):
        return
    pairs = (plans.standing, job.standing_plans), (plans.by_count, job.layouts_by_count)
    if plans.spares == job.spares and all(_without_reasons(new) == _without_reasons(old) for new, old in pairs):
        return
    job.standing_plans, job.layouts_by_count, job.plan_digest = plans.standing, plans.by_count, plans.digest
    job.spares = plans.spares
    refresh_members(session, job, now=now)
    due_at = job.due_at
    touch(session, job, now=now, is_urgent=False)
    job.due_at = due_at


def _without_reasons(items: list) -> list:
    return [{key: value for key, value in item.items() if key not in ("reason", "plan_digest")} for item in items]


def _schedule(job: JobRow, claim: Claim, action: Action, *, now: datetime) -> None:
    """Set when to look again, unless something has made the job due since it was claimed."""
    if job.due_at == claim.due_at:
        job.due_at = now + timedelta(seconds=look_again_in_s(JobState(job.state), action))
