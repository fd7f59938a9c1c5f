"""Proposes and drops handoffs, and stores agents' copies, also of handoffs opened without the service."""

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from agent.protocol.sync import HandoffDeclined, HandoffMirror
from agent.protocol.values import HandoffCause, HandoffState
from liver_core.handoff import RankStage, Reason, Rung, StoreAddress
from liver_core.handoff.generations import first_of as first_world_of
from liver_core.layout import Roster
from service.db.roster_rows import stored_roster
from service.handoffs.queries import untold
from service.handoffs.rules import (
    Copy,
    accepts_active,
    is_newer,
    is_open,
    is_opened_anew,
    orders_differ,
    went_through,
    why_opened,
)
from service.handoffs.tables import DECLINED, HandoffRow
from service.jobs.causes import (
    FIRST_CAUSE_WITHIN_S,
    FailedPart,
    FirstCause,
    at_store,
    blamed_in,
    cause_of_attempt,
    cause_of_rank,
    end_of,
    first_cause,
    said_of,
    stood_in_the_way,
    stopped_among,
)
from service.jobs.operations import Birth, activate, add_generation, burn, set_state
from service.jobs.queries import active_row
from service.jobs.rules import deadline_of, seconds
from service.jobs.tables import ENDED, GenerationRow, JobRow, JobState, SourceKind
from service.jobs.view import Action
from service.leases.queries import lease_since
from service.ledger.egress import note_egress
from service.ledger.operations import charge_pause
from service.nodes.tables import NodeRow, NodeState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mirrored:
    """The result of storing one mirror. `refusal`: why it is rejected. `orders_differ`: whether the orders of the job's
    agents change; if not, only watchers of the job get news."""

    refusal: str | None = None
    orders_differ: bool = False


def propose_handoff(session: Session, job: JobRow, action: Action, *, plan_digest: str, now: datetime) -> HandoffRow:
    """A handoff for the agents to open. It has no generation: opening burns one."""
    assert action.target is not None and job.active_generation is not None
    active = active_row(session, job)
    row = HandoffRow(
        handoff_id=uuid4(),
        job_id=job.job_id,
        parent=job.active_generation,
        generation=None,
        plan_digest=plan_digest,
        proposer="service",
        cause=HandoffCause.NOTICE if action.leaving else HandoffCause.GROW,
        state=HandoffState.PROPOSED,
        rung=Rung.STOP_AND_COPY,
        source=active.roster if active else None,
        target=action.target.model_dump(mode="json"),
        source_layout=active.layout if active else "",
        target_layout=str(action.target.layout),
        leaving=[item.node_id for item in action.leaving],
        why=action.reason,
        reason=action.reason,
        opened_at=now,
        deadline_at=deadline_of(action.leaving),
        changed_at=now,
        recorded_at=now,
    )
    session.add(row)
    session.flush()
    return row


def drop_handoff(row: HandoffRow, reason: str, *, now: datetime) -> None:
    """Abort a handoff that no agent drives. If agents do drive it, their next mirror overrides this."""
    row.state = HandoffState.ABORTED
    row.reason = reason
    row.changed_at = row.recorded_at = now


def drop_proposals(session: Session, job_id: str, reason: str, *, now: datetime) -> None:
    """Abort what no agent has opened."""
    is_open = HandoffRow.job_id == job_id, HandoffRow.state == HandoffState.PROPOSED
    for row in session.scalars(select(HandoffRow).where(*is_open)):
        drop_handoff(row, reason, now=now)


def decline_handoff(
    session: Session, job: JobRow, declined: HandoffDeclined, *, node_id: str, now: datetime
) -> str | None:
    """End a proposal that no agent has opened, since the one whose turn it is will not. Returns why its word does not
    count, None if it does. The caller has locked the job's row."""
    row = session.get(HandoffRow, declined.handoff_id, with_for_update={"key_share": True}, populate_existing=True)
    if row is None or row.job_id != job.job_id:
        return f"job {job.job_id} has no handoff {declined.handoff_id}"
    worlds = [world for world in (row.source, row.target) if world is not None]
    if node_id not in {member["node_id"] for world in worlds for member in world["members"]}:
        return f"node {node_id} has no part in handoff {declined.handoff_id}"
    if row.state == HandoffState.PROPOSED:
        drop_handoff(row, f"{node_id} does not open it: {declined.reason}", now=now)
        row.reason_detail = _detail(Reason(declined.reason, DECLINED))
    return None


def mirror_handoff(session: Session, job: JobRow, mirror: HandoffMirror, *, now: datetime) -> Mirrored:
    """Store an agent's copy of a handoff.

    The caller has locked the job's row. A handoff that is active becomes the job's generation by compare-and-set.
    """
    if mirror.target.job_id != job.job_id or mirror.target.generation != mirror.generation:
        return Mirrored("target names another job or generation than the handoff")
    row = session.get(HandoffRow, mirror.handoff_id, with_for_update={"key_share": True}, populate_existing=True)
    if row is not None and row.job_id != job.job_id:
        return Mirrored(f"handoff {mirror.handoff_id} belongs to another job")
    new, old = Copy(mirror.state, mirror.plan_revision, mirror.mirror_seq, mirror.generation), None
    anew = False
    if row is not None:
        old = Copy(HandoffState(row.state), row.plan_revision, row.mirror_seq, row.generation)
        if not is_newer(new, old) or (old.generation is not None and _is_over(row, job, new)):
            return Mirrored()
        anew = is_opened_anew(new, old)
        if anew:
            old = None  # What was dropped here, or under an earlier number, counts as unknown.
    generation_taken = _claim_number(session, job, mirror, now=now)
    if generation_taken is not None and mirror.state is not HandoffState.ABORTED:
        return Mirrored(generation_taken, orders_differ=True)
    opened = old is None or old.generation is None
    if row is not None and anew:
        row.reason, row.reason_detail, row.ended_by = "", None, None
    if row is None:
        row = HandoffRow(handoff_id=mirror.handoff_id, job_id=job.job_id, opened_at=mirror.opened_utc)
        session.add(row)
    with session.no_autoflush:
        row.why = why_opened(row.why, row.leaving or (), mirror)
        _copy_over(row, mirror, now=now)
        row.source_layout = row.source_layout or _layout_of_parent(session, job, mirror)
        if generation_taken is not None:
            # Two agents took the same number before either heard of the other. Every attempt is recorded.
            row.generation = None
        if row.ended_by is None and mirror.state in (HandoffState.ABORTED, HandoffState.BROKEN):
            cause = _first_cause(session, mirror)
            row.ended_by = cause.as_json() if cause else None
    burn(job, mirror.generation)
    session.flush()
    _adopt_parent(session, job, mirror, now=now)
    if mirror.state is not HandoffState.ABORTED and (old is None or is_open(old.state)):
        _drop_unopened(session, job, mirror, now=now)
    refusal = None
    if mirror.state is HandoffState.ACTIVE:
        refusal = _activate_if_due(session, job, row, mirror.target, mirror.store_node, mirror.store, now=now)
    if refusal is not None:
        row.reason = f"{row.reason}; rejected as the job's generation: {refusal}".removeprefix("; ")
        return Mirrored(refusal, orders_differ=True)
    _charge_pause(session, row, mirror, now=now)
    note_egress(session, row, mirror)
    return Mirrored(orders_differ=opened or orders_differ(new, old))


def adopt_world(session: Session, job: JobRow, world: Roster, reason: str, *, now: datetime) -> None:
    """The handoff to this world counts as active: all of its ranks train, and its lead cannot tell. It may have been
    opened with another target."""
    row = untold(session, job.job_id, world.generation)
    if row is None:
        return
    row.target, row.target_layout = stored_roster(world), str(world.layout)
    row.state, row.stage, row.reason, row.reason_detail = HandoffState.ACTIVE, HandoffState.ACTIVE, reason, None
    row.changed_at = row.recorded_at = now
    refusal = _activate_if_due(session, job, row, world, None, None, now=now)
    if refusal is not None:
        row.reason = f"{reason}; rejected as the job's generation: {refusal}"


def _adopt_parent(session: Session, job: JobRow, mirror: HandoffMirror, *, now: datetime) -> None:
    """Whoever opens a handoff steps in the world that it leaves: what led there went through, if nobody has told."""
    if job.active_generation is not None and mirror.parent > job.active_generation and mirror.source is not None:
        reason = f"handoff {mirror.handoff_id} begins in its world, and nobody has told that it went through"
        adopt_world(session, job, mirror.source, reason, now=now)


def name_cause(session: Session, job_id: str, cause: FirstCause, *, since: datetime) -> None:
    """How a rank ended is known now: it is the cause of an attempt for which others have missed that rank, shortly
    before `since` or later."""
    session.execute(
        update(HandoffRow)
        .where(
            HandoffRow.job_id == job_id,
            HandoffRow.ended_by["what"].astext == FailedPart.PEER.value,
            HandoffRow.recorded_at >= since - seconds(FIRST_CAUSE_WITHIN_S),
        )
        .values(ended_by=cause.as_json())
        .execution_options(synchronize_session=False)
    )


def _is_over(row: HandoffRow, job: JobRow, new: Copy) -> bool:
    """Whether an aborted attempt is reported broken although the job has left the world that it would end."""
    return (
        row.state == HandoffState.ABORTED and new.state is HandoffState.BROKEN and row.parent != job.active_generation
    )


def _first_cause(session: Session, mirror: HandoffMirror) -> FirstCause | None:
    """What ended an attempt, by the reason of its lead and by what the agents of its nodes report of their ranks."""
    is_broken = mirror.state is HandoffState.BROKEN
    if mirror.superseded and not is_broken:
        return None
    worlds = [roster for roster in (mirror.source, mirror.target) if roster is not None]
    nodes = session.scalars(
        select(NodeRow).where(NodeRow.node_id.in_({node for roster in worlds for node in roster.node_ids()}))
    ).all()
    ranks = [
        (node.node_id, rank)
        for node in nodes
        for rank in node.ranks
        if rank["job_id"] == mirror.job_id and rank["generation"] in (mirror.parent, mirror.generation)
    ]
    failed = [each for each in ranks if each[1]["stage"] in (RankStage.FAILED, RankStage.BROKEN)]
    parent = session.get(GenerationRow, (mirror.job_id, mirror.parent))
    stores = {mirror.parent: parent.store_node if parent is not None else None, mirror.generation: mirror.store_node}
    ended = [
        at_store(
            cause_of_rank(node_id, rank["rank"], rank["step"], said_of(rank), end_of(rank), blamed=blamed_in(rank)),
            stores[rank["generation"]],
        )
        for node_id, rank in failed
    ]
    told = None
    if mirror.reason is not None:
        told = cause_of_attempt(mirror.reason, store_node=mirror.store_node, source=mirror.source)
    known = FirstCause.of(parent.ended_by) if parent is not None else None
    if known is not None and (told is not None or is_broken):
        ended.append(known)  # The world has ended meanwhile, and its ranks are not reported any more.
    complain = {node_id for node_id, _ in failed}
    away = [node.node_id for node in nodes if node.state != NodeState.READY and node.node_id not in complain]
    stopped = stopped_among(ranks)
    found = first_cause((*ended, told), away=away, stopped=stopped)
    return stood_in_the_way(mirror.reason, away, stopped) if found is None else found


def _claim_number(session: Session, job: JobRow, mirror: HandoffMirror, *, now: datetime) -> str | None:
    """Why this handoff cannot have its generation number, None if it can. A number is used once.

    If an earlier mirror of another handoff has the number, this one takes it over, unless the other is active or this
    one is aborted.
    """
    activated = session.get(GenerationRow, (job.job_id, mirror.generation))
    if activated is not None and activated.origin_id != mirror.handoff_id:
        return f"generation {mirror.generation} of this job was made by {activated.origin_id}"
    statement = select(HandoffRow).where(
        HandoffRow.job_id == job.job_id,
        HandoffRow.generation == mirror.generation,
        HandoffRow.handoff_id != mirror.handoff_id,
    )
    other = session.scalars(statement).one_or_none()
    if other is None:
        return None
    if mirror.state is HandoffState.ABORTED or (other.state == HandoffState.ACTIVE):
        return f"generation {mirror.generation} of this job belongs to handoff {other.handoff_id}"
    other.generation = None
    if is_open(HandoffState(other.state)):  # Else what ended it is known, and stays its cause.
        drop_handoff(other, f"generation {mirror.generation} now belongs to handoff {mirror.handoff_id}", now=now)
    session.flush()
    return None


def _drop_unopened(session: Session, job: JobRow, mirror: HandoffMirror, *, now: datetime) -> None:
    """Drop a proposal of the service if the agents have opened a handoff of their own instead."""
    statement = select(HandoffRow).where(
        HandoffRow.job_id == job.job_id,
        HandoffRow.state == HandoffState.PROPOSED,
        HandoffRow.handoff_id != mirror.handoff_id,
        HandoffRow.parent <= mirror.parent,
    )
    for row in session.scalars(statement):
        drop_handoff(row, f"the agents opened handoff {mirror.handoff_id} instead", now=now)
        row.superseded = True


def _detail(reason: Reason) -> dict[str, Any]:
    """For the API, where null says that something is not known."""
    where = {"rank": reason.rank, "tile": reason.tile or None, "node": reason.node or None}
    return {"text": reason.text, "phase": reason.phase, **where}


def _copy_over(row: HandoffRow, mirror: HandoffMirror, *, now: datetime) -> None:
    row.parent = mirror.parent
    row.generation = mirror.generation
    row.plan_revision = mirror.plan_revision
    row.plan_digest = mirror.plan_digest or row.plan_digest or ""
    row.mirror_seq = mirror.mirror_seq
    row.proposer = row.proposer or mirror.proposer
    row.cause = mirror.cause
    row.state = mirror.state
    row.stage = mirror.stage
    row.rung = mirror.rung
    if mirror.source is not None:
        row.source = stored_roster(mirror.source)
        row.source_layout = str(mirror.source.layout)
    row.target = stored_roster(mirror.target)
    row.target_layout = str(mirror.target.layout)
    row.leaving = list(mirror.leaving)
    row.decision = mirror.decision
    row.superseded = mirror.superseded
    if mirror.reason is not None:
        row.reason = mirror.reason.text
        row.reason_detail = _detail(mirror.reason)
    row.deadline_at = mirror.deadline_utc or row.deadline_at
    row.changed_at = mirror.changed_utc
    row.recorded_at = now
    row.measures = mirror.measures.model_dump(mode="json")


def _layout_of_parent(session: Session, job: JobRow, mirror: HandoffMirror) -> str:
    parent = session.get(GenerationRow, (job.job_id, mirror.parent))
    return parent.layout if parent is not None else ""


def _activate_if_due(
    session: Session,
    job: JobRow,
    handoff: HandoffRow,
    target: Roster,
    store_node: str | None,
    store: StoreAddress | None,
    *,
    now: datetime,
) -> str | None:
    """Make the `target` of an active handoff the job's generation. None if it is (or already was), else why it cannot
    be."""
    why, generation = handoff.why, target.generation
    activated = session.get(GenerationRow, (job.job_id, generation))
    if activated is not None:
        return None
    if job.state in ENDED:
        return f"the job is {job.state}"
    columns = GenerationRow.generation, GenerationRow.parent, GenerationRow.source_kind, GenerationRow.created_at
    known = session.execute(select(*columns).where(GenerationRow.job_id == job.job_id)).all()
    started_here = frozenset(row.generation for row in known if row.source_kind != SourceKind.HANDOFF)
    expected, number = job.active_generation, {"parent": handoff.parent, "generation": generation}
    refusal = accepts_active(active=expected, **number, started_here=started_here)
    recorded = {row.generation: row.parent for row in known}
    is_past = refusal is not None and went_through(**number, recorded=recorded, started_here=started_here)
    if refusal is not None and not is_past:
        return refusal
    before = active_row(session, job)
    birth = Birth(handoff.handoff_id, SourceKind.HANDOFF, why, repeats_until=before.repeats_until if before else 0)
    born_at = min((row.created_at for row in known if row.generation > generation), default=now)
    row = add_generation(session, job, target, birth, parent=handoff.parent, now=born_at)
    row.store_node = store_node
    row.store_host = store.host if store else None
    row.store_port = store.port if store else None
    if is_past:
        _log.info("job %s: handoff %s made generation %s, since left", job.job_id, handoff.handoff_id, generation)
        return None
    job.error_at = None
    if not activate(session, job, expected=expected, generation=generation):
        return "another generation became active at the same moment"
    if job.state in (JobState.STARTING, JobState.RUNNING):
        set_state(session, job, JobState.RUNNING, why, now=now)
        job.failed_starts = 0
    _log.info("job %s: handoff %s made generation %s active", job.job_id, handoff.handoff_id, generation)
    return None


def _charge_pause(session: Session, row: HandoffRow, mirror: HandoffMirror, *, now: datetime) -> None:
    """Account the measured pause in the ledger on every slot of the new world, once, and what it was longer where that
    becomes known later. A slot has paused no longer than its lease lasts, and the start that the world is of."""
    pause_s, charged_s = mirror.measures.pause_s, row.pause_charged_s
    if mirror.state is not HandoffState.ACTIVE or pause_s is None or pause_s <= charged_s:
        return
    row.pause_charged_s = pause_s
    start = session.get(GenerationRow, (row.job_id, first_world_of(mirror.generation)))
    leases = {node_id: lease_since(session, node_id, mirror.opened_utc) for node_id in mirror.target.node_ids()}
    # In a fixed order, so that two reports that charge the same slots cannot wait for each other.
    for member in sorted(mirror.target.members, key=lambda item: (item.node_id, item.slot)):
        lease = leases[member.node_id]
        if lease is None or member.slot >= lease.slots:
            continue
        since = lease.started_at if start is None else max(lease.started_at, start.created_at)
        most_s = max(0.0, (now - since).total_seconds())
        more_s = min(pause_s, most_s) - min(charged_s, most_s)
        charge_pause(session, lease=lease, slot=member.slot, seconds=more_s, job_id=row.job_id)
