"""Stores a decision, in the transaction that acts on it; trims old ones."""

from dataclasses import asdict
from datetime import datetime

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from liver_core.layout.limits import fitting
from service.audit.tables import AuditRow
from service.db.base import among
from service.decisions.rules import OPTIONS_MAX, Decided, made_from, wanted
from service.decisions.tables import DecisionRow
from service.jobs.tables import JobRow

KEPT_MAX = 500
"""Decisions of one job; older ones are dropped, soon after."""
TRIMMED_MAX = 20_000

_TRIM = text(
    """
    DELETE FROM decisions WHERE decision_id IN (
        SELECT old.decision_id
          FROM (SELECT job_id FROM jobs WHERE due_at IS NOT NULL ORDER BY random() LIMIT 64) AS living
         CROSS JOIN LATERAL (SELECT decision_id FROM decisions WHERE decisions.job_id = living.job_id
                              ORDER BY decision_id DESC OFFSET :kept LIMIT :most) AS old
         LIMIT :most)
    """
)


def record(session: Session, job: JobRow, decided: Decided | None, *, now: datetime) -> None:
    """Append the decision, unless it is the one before once more."""
    if decided is None:
        return
    mine = select(DecisionRow.what_sha256).where(DecisionRow.job_id == job.job_id)
    newest = session.scalars(mine.order_by(DecisionRow.decision_id.desc()).limit(1)).one_or_none()
    if newest == decided.digest():
        return
    considered = decided.considered
    session.add(
        DecisionRow(
            job_id=job.job_id,
            decided_at=now,
            action=decided.action.do,
            reason=fitting(decided.action.reason),
            asked_by=decided.by(_actor(session, job, decided.asked)),
            verdict=considered.decision.verdict,
            verdict_reason=fitting(considered.decision.reason),
            layout=considered.layout,
            nodes=list(considered.nodes),
            alternatives=[asdict(item) for item in considered.alternatives()],
            inputs=made_from(considered.inputs),
            options=[asdict(item) for item in considered.decision.options[:OPTIONS_MAX]],
            alerts=list(considered.decision.alerts),
            wanted=wanted(considered.decision),
            inputs_digest=considered.inputs.digest(),
            what_sha256=decided.digest(),
        )
    )


def trim_decisions(session: Session, *, most: int = TRIMMED_MAX) -> int:
    """Drop up to `most` of the oldest decisions above the limit, of some jobs that have not ended. Returns how many."""
    return session.connection().execute(_TRIM, {"kept": KEPT_MAX, "most": most}).rowcount


def _actor(session: Session, job: JobRow, actions: tuple[str, ...]) -> str | None:
    if not actions:
        return None
    rows = select(AuditRow.actor).where(AuditRow.target == job.job_id, among(AuditRow.action, "actions"))
    newest = rows.order_by(AuditRow.audit_id.desc()).limit(1)
    return session.scalars(newest, {"actions": list(actions)}).one_or_none()
