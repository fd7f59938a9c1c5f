"""Reads of handoffs."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import takewhile
from uuid import UUID

from sqlalchemy import bindparam, exists, select
from sqlalchemy.orm import Session

from agent.protocol.sync import HandoffMirror
from agent.protocol.values import HandoffState, Placement
from liver_core.handoff import Decision, Rung
from service.db.base import among
from service.handoffs.rules import OPEN, WAITS_TIMES_MAX, Declined, OpenHandoff, furthest, may_lose_leavers
from service.handoffs.start_times import STARTS_LOOKED_AT, Starts, starts_of
from service.handoffs.tables import DECLINED, HandoffRow
from service.jobs.causes import FirstCause
from service.jobs.tables import GenerationRow, JobRow, JobState, SourceKind
from service.jobs.view import Loss
from service.nodes.tables import NodeRow
from service.paging import Pages

_BEGINS_AN_ID = re.compile("[0-9a-f]{1,32}")
# The states are literals: with parameters, a prepared statement could not use the partial index.
_IS_OPEN = HandoffRow.state.in_(bindparam("open", OPEN, expanding=True, literal_execute=True))
_OPEN = select(HandoffRow).where(among(HandoffRow.job_id, "job_ids"), _IS_OPEN)


def list_handoffs(
    session: Session,
    pages: Pages,
    *,
    job_id: str | None = None,
    match: str | None = None,
    states: Collection[HandoffState] = (),
) -> Sequence[HandoffRow]:
    """Newest first. `match`: only those whose id begins so; `states`: any, if empty."""
    statement = select(HandoffRow)
    if job_id is not None:
        statement = statement.where(HandoffRow.job_id == job_id)
    if states:
        statement = statement.where(HandoffRow.state.in_(states))
    if match is not None:
        digits = match.replace("-", "").lower()
        if not _BEGINS_AN_ID.fullmatch(digits):
            return ()
        # As bounds, since an index orders ids and not their text.
        least, most = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
        statement = statement.where(HandoffRow.handoff_id.between(least, most))
    return pages.newest(session, statement, HandoffRow.opened_at, HandoffRow.handoff_id)


def lost_seconds(session: Session, job_id: str, *, most: int) -> list[float]:
    """Training time that the job's newest live handoffs lost, of those where it was measured; newest first."""
    lost = HandoffRow.measures["lost_s"].as_float()
    statement = (
        select(lost)
        .where(HandoffRow.job_id == job_id, HandoffRow.state == HandoffState.ACTIVE, HandoffRow.rung == Rung.LIVE)
        .where(lost.is_not(None))
        .order_by(HandoffRow.opened_at.desc(), HandoffRow.handoff_id.desc())
        .limit(most)
    )
    return list(session.scalars(statement))


def open_handoff(session: Session, job_id: str) -> HandoffRow | None:
    """The handoff that may still become active; if several are known, the one that is furthest."""
    return open_handoffs(session, [job_id]).get(job_id)


def is_stored(session: Session, mirror: HandoffMirror) -> bool:
    """Whether this copy of a handoff, or a newer one of the same proposer, has been taken before."""
    wanted = (
        HandoffRow.handoff_id == mirror.handoff_id,
        HandoffRow.job_id == mirror.job_id,
        HandoffRow.proposer == mirror.proposer,
        HandoffRow.mirror_seq >= mirror.mirror_seq,
    )
    return session.scalar(select(exists().where(*wanted))) is True


def open_handoffs(session: Session, job_ids: Iterable[str]) -> dict[str, HandoffRow]:
    """The same for several jobs, of those that have one."""
    rows = session.scalars(_OPEN, {"job_ids": list(job_ids)}).all()
    # The furthest comes last and replaces the others.
    return {
        row.job_id: row for row in sorted(rows, key=lambda row: (OPEN.index(HandoffState(row.state)), row.opened_at))
    }


def last_ended(session: Session, job_id: str) -> HandoffRow | None:
    """The handoff that ended last, however it ended."""
    statement = (
        select(HandoffRow)
        .where(HandoffRow.job_id == job_id, HandoffRow.state.not_in(OPEN))
        .order_by(HandoffRow.recorded_at.desc())
        .limit(1)
    )
    return session.scalars(statement).one_or_none()


def broken_by(session: Session, job: JobRow) -> Sequence[HandoffRow]:
    """Those by which the active world is lost, even if its ranks do not report it: a handoff from it that broke after
    the boundary, or the start that should have made it and broke or was aborted."""
    if job.active_generation is None:
        return ()
    started = session.get(GenerationRow, (job.job_id, job.active_generation))
    return session.scalars(
        select(HandoffRow)
        .where(
            HandoffRow.job_id == job.job_id,
            ((HandoffRow.parent == job.active_generation) & (HandoffRow.state == HandoffState.BROKEN))
            | (
                (HandoffRow.handoff_id == (started.origin_id if started else None))
                & HandoffRow.state.in_([HandoffState.BROKEN, HandoffState.ABORTED])
            ),
        )
        .order_by(HandoffRow.recorded_at, HandoffRow.handoff_id)
    ).all()


def as_loss(row: HandoffRow) -> Loss:
    """Why the active world is lost, by a handoff that `broken_by` found."""
    text = f"handoff {row.handoff_id} is {row.state}: {row.reason or 'no reason given'}"
    return Loss(text, FirstCause.of(row.ended_by), since=row.recorded_at)


def as_open(row: HandoffRow, *, crosses: bool = False) -> OpenHandoff:
    """The pure form. `changed_at` is when the service got the report, so that a wrong clock on a node does no harm.
    `crosses`: a rank says that it is past the boundary, whatever the lead has told."""
    target, state = placement_of(row), furthest(HandoffState(row.state), crosses=crosses)
    return OpenHandoff(
        handoff_id=UUID(str(row.handoff_id)),
        state=state,
        leaving=tuple(row.leaving),
        target_nodes=target.node_ids(),
        opened_at=row.opened_at,
        changed_at=row.recorded_at,
        deadline_at=row.deadline_at,
        may_lose_leavers=may_lose_leavers(state, Rung(row.rung), Decision(row.decision or Decision.UNDECIDED)),
    )


def declined(session: Session, row: HandoffRow | None, *, active: int | None) -> Declined | None:
    """The pure form of a proposal that an agent did not open, or that was opened and aborted, if it would have left the
    `active` generation. What answers a notice, and fails, is opened again by the agents while there is time."""
    if row is None or row.parent != active or row.state != HandoffState.ABORTED:
        return None
    found = Declined(placement_of(row), tuple(row.leaving), row.recorded_at, row.reason)
    if (row.reason_detail or {}).get("phase") == DECLINED:
        return found
    if row.generation is None or row.leaving or row.superseded:
        return None
    tried = (
        select(HandoffRow)
        .where(HandoffRow.job_id == row.job_id, HandoffRow.parent == active, HandoffRow.state == HandoffState.ABORTED)
        .where(HandoffRow.generation.is_not(None))
        .order_by(HandoffRow.opened_at.desc(), HandoffRow.handoff_id.desc())
        .limit(WAITS_TIMES_MAX)
    )
    same = takewhile(lambda each: (placement_of(each), each.leaving) == (found.target, []), session.scalars(tried))
    return replace(found, times=max(1, sum(1 for _ in same)))


def untold(session: Session, job_id: str, generation: int) -> HandoffRow | None:
    """The handoff that has this number, unless it is known to have become active or to be broken."""
    row = session.scalars(select(HandoffRow).filter_by(job_id=job_id, generation=generation)).one_or_none()
    return None if row is None or row.state in (HandoffState.ACTIVE, HandoffState.BROKEN) else row


def placement_of(row: HandoffRow) -> Placement:
    """The target as it was stored, without job and generation."""
    return Placement.model_validate({key: row.target[key] for key in ("layout", "members")}, strict=False)


def lost_sight_of(
    session: Session, members: set[str], handoff: HandoffRow | None, since: datetime
) -> tuple[tuple[str, datetime], ...]:
    """Nodes of a world and of the next one of its open handoff that were not heard since, and when each was last."""
    wanted = members | set(placement_of(handoff).node_ids() if handoff is not None else ())
    rows = select(NodeRow.node_id, NodeRow.last_seen_at).where(NodeRow.node_id.in_(wanted))
    away = session.execute(rows.where(NodeRow.last_seen_at < since).order_by(NodeRow.node_id))
    return tuple((node_id, at) for node_id, at in away)


def starts(session: Session, job: JobRow) -> Starts:
    """How the newest starts of a job went. Asked only where it counts: while it starts, or waits for a next one."""
    if job.state not in (JobState.STARTING, JobState.SUSPENDED):
        return Starts()
    statement = (
        select(GenerationRow.source_kind, GenerationRow.created_at, GenerationRow.first_step_at)
        .where(GenerationRow.job_id == job.job_id, GenerationRow.source_kind != SourceKind.HANDOFF)
        .order_by(GenerationRow.generation.desc())
        .limit(STARTS_LOOKED_AT)
    )
    found = session.execute(statement)
    return starts_of((row.source_kind, row.created_at, row.first_step_at) for row in found)
