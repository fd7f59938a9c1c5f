"""Looks at what pages show, and says what has changed since the look before. One look serves all browsers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from agent.protocol.sync import NoticeKind
from service.audit.endpoints import AuditOut
from service.audit.tables import AuditRow
from service.events.schemas import (
    AuditEvent,
    HandoffsEvent,
    IncidentsEvent,
    JobBrief,
    JobsEvent,
    NodeBrief,
    NodesEvent,
    StepsEvent,
)
from service.fleet.queries import pending_now
from service.fleet.schemas import PendingOut
from service.handoffs.queries import open_handoffs
from service.handoffs.schemas import HandoffOut
from service.handoffs.tables import HandoffRow
from service.jobs.schemas import StepOut
from service.jobs.tables import GenerationRow, JobRow, JobStepRow, shown_reason
from service.nodes.tables import NodeRow, NodeState
from service.notices.queries import open_notices
from service.notices.rules import takes_node

JOBS_MAX, NODES_MAX, STEPS_MAX, AUDIT_MAX = 1_000, 20_000, 200, 100
Publish = Callable[[str, BaseModel, str | None], None]


@dataclass(slots=True)
class Seen:
    """What the look before has seen. Empty before the first one, which says nothing."""

    jobs: dict[str, JobBrief] = field(default_factory=dict)
    handoffs: dict[UUID, tuple[Any, ...]] = field(default_factory=dict)
    nodes: dict[str, NodeBrief] = field(default_factory=dict)
    pending: str = ""
    audit_id: int | None = None
    steps_at: dict[str, datetime] = field(default_factory=dict)


def look(session: Session, seen: Seen, wanted: Mapping[str, int], publish: Publish, *, now: datetime) -> None:
    """Publish what differs from `seen`, and remember it. `wanted`: jobs whose steps somebody watches."""
    is_first = seen.audit_id is None
    moved = _jobs(session, seen, publish if not is_first else _nothing)
    _handoffs(session, seen, moved, publish if not is_first else _nothing)
    _nodes(session, seen, publish if not is_first else _nothing, now=now)
    _incidents(session, seen, publish if not is_first else _nothing, now=now)
    _audit(session, seen, publish if not is_first else _nothing)
    _steps(session, seen, wanted, publish, now=now)


def _nothing(name: str, data: BaseModel, job_id: str | None) -> None:
    """The first look only remembers."""


def _jobs(session: Session, seen: Seen, publish: Publish) -> list[tuple[str, int]]:
    """Returns job and generation of those whose generation is another one."""
    columns = select(
        JobRow.job_id, JobRow.name, JobRow.state, JobRow.reason, JobRow.no_orders_because, JobRow.paused_because,
        JobRow.warning, JobRow.active_generation, JobRow.last_step,
        JobRow.spec["stop"]["steps"].as_integer().label("stop_steps"), JobRow.lost_steps, JobRow.last_step_at,
        JobRow.standstill, JobRow.state_changed_at, GenerationRow.layout,
    ).outerjoin(
        GenerationRow,
        (GenerationRow.job_id == JobRow.job_id) & (GenerationRow.generation == JobRow.active_generation),
    )  # fmt: skip
    living = columns.where(JobRow.due_at.is_not(None)).order_by(JobRow.created_at.desc()).limit(JOBS_MAX)
    now = {row.job_id: _brief(row) for row in session.execute(living)}
    before = seen.jobs
    ended = [job_id for job_id in before if job_id not in now]
    last = (
        {row.job_id: _brief(row) for row in session.execute(columns.where(JobRow.job_id.in_(ended)))} if ended else {}
    )
    changed = [brief for job_id, brief in {**now, **last}.items() if before.get(job_id) != brief]
    gone = [job_id for job_id in ended if job_id not in last]
    if changed or gone:
        publish("jobs", JobsEvent(jobs=changed, gone=gone), None)
    seen.jobs = now
    return [
        (brief.job_id, brief.active_generation)
        for brief in changed
        if brief.active_generation is not None
        and brief.job_id in before
        and before[brief.job_id].active_generation != brief.active_generation
    ]


def _brief(row: Any) -> JobBrief:
    values = row._asdict()
    shown = shown_reason(values["reason"], values.pop("no_orders_because"))
    return JobBrief.model_validate(values | {"reason": shown, "paused": bool(values.pop("paused_because"))})


def _handoffs(session: Session, seen: Seen, moved: list[tuple[str, int]], publish: Publish) -> None:
    rows = {row.handoff_id: row for row in open_handoffs(session, seen.jobs).values()}
    now = {handoff_id: (row.state, row.mirror_seq, row.plan_revision) for handoff_id, row in rows.items()}
    changed = [row for handoff_id, row in rows.items() if seen.handoffs.get(handoff_id) != now[handoff_id]]
    ended = [handoff_id for handoff_id in seen.handoffs if handoff_id not in now]
    if ended:
        changed += session.scalars(select(HandoffRow).where(HandoffRow.handoff_id.in_(ended))).all()
    for job_id, generation in moved:
        # It may have begun and ended between two looks.
        mine = select(HandoffRow).where(HandoffRow.job_id == job_id, HandoffRow.generation == generation)
        changed += [row for row in session.scalars(mine) if row.handoff_id not in {item.handoff_id for item in changed}]
    if changed:
        publish("handoffs", HandoffsEvent(handoffs=[HandoffOut.of(row) for row in changed]), None)
    seen.handoffs = now


def _nodes(session: Session, seen: Seen, publish: Publish, *, now: datetime) -> None:
    going = {row.node_id for row in open_notices(session, now=now) if takes_node(NoticeKind(row.kind))}
    living = select(NodeRow.node_id, NodeRow.pool, NodeRow.state).where(NodeRow.state != NodeState.GONE)
    found = {
        row.node_id: NodeBrief(node_id=row.node_id, pool=row.pool, state=row.state, leaving=row.node_id in going)
        for row in session.execute(living.limit(NODES_MAX))
    }
    changed = [node for node_id, node in found.items() if seen.nodes.get(node_id) != node]
    gone = [node_id for node_id in seen.nodes if node_id not in found]
    if changed or gone:
        publish("nodes", NodesEvent(nodes=changed, gone=gone), None)
    seen.nodes = found


def _incidents(session: Session, seen: Seen, publish: Publish, *, now: datetime) -> None:
    pending = IncidentsEvent(pending=[PendingOut.of(item) for item in pending_now(session, now=now)])
    text = pending.model_dump_json()
    if text != seen.pending:
        publish("incidents", pending, None)
    seen.pending = text


def _audit(session: Session, seen: Seen, publish: Publish) -> None:
    newest = session.scalars(select(func.max(AuditRow.audit_id))).one() or 0
    if seen.audit_id is not None and newest > seen.audit_id:
        new = select(AuditRow).where(AuditRow.audit_id > seen.audit_id).order_by(AuditRow.audit_id.desc())
        rows = session.scalars(new.limit(AUDIT_MAX)).all()[::-1]
        publish("audit", AuditEvent(rows=[AuditOut.model_validate(row, from_attributes=True) for row in rows]), None)
    seen.audit_id = max(newest, seen.audit_id or 0)


def _steps(session: Session, seen: Seen, wanted: Mapping[str, int], publish: Publish, *, now: datetime) -> None:
    for job_id in wanted:
        after = seen.steps_at.get(job_id)
        mine = select(JobStepRow).where(JobStepRow.job_id == job_id)
        if after is None:
            newest = session.scalars(mine.order_by(JobStepRow.finished_at.desc()).limit(1)).first()
            seen.steps_at[job_id] = newest.finished_at if newest is not None else now - timedelta(days=3650)
            continue
        newest_first = (JobStepRow.finished_at.desc(), JobStepRow.step.desc(), JobStepRow.generation.desc())
        new = mine.where(JobStepRow.finished_at > after).order_by(*newest_first).limit(STEPS_MAX)
        rows = session.scalars(new).all()[::-1]
        if rows:
            seen.steps_at[job_id] = rows[-1].finished_at
            publish("steps", StepsEvent(job_id=job_id, steps=[StepOut.of(row) for row in rows]), job_id)
    for job_id in [job_id for job_id in seen.steps_at if job_id not in wanted]:
        del seen.steps_at[job_id]
