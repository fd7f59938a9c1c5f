"""What a job has cost, and what is left of its steps, its time and its money."""

from datetime import datetime

from sqlalchemy.orm import Session

from agent.protocol.jobfile import JobFile
from service.ledger.queries import egress, summary
from service.planner.goals import Remaining

REMAINING_DIGITS = 3


def spent_usd_of(session: Session, job_id: str) -> float:
    """What the job has cost so far, as far as prices are known."""
    sums, moved = summary(session, job_id=job_id), egress(session, job_id=job_id)
    return sum(item.dollars for item in sums) + (moved.dollars or 0.0)


def remaining_of(spec: JobFile, *, last_step: int, spent_usd: float, now: datetime) -> Remaining | None:
    """Rounded: plans are made anew for other inputs only."""
    if spec.budget_usd is None and spec.deadline is None:
        return None
    time_s = (spec.deadline - now).total_seconds() if spec.deadline is not None else None
    usd = spec.budget_usd - spent_usd if spec.budget_usd is not None else None
    return Remaining(
        steps=int(_rounded(spec.stop.steps - last_step)),
        deadline_in_s=None if time_s is None else _rounded(time_s),
        usd=None if usd is None else _rounded(usd),
    )


def _rounded(value: float) -> float:
    return float(f"{max(0.0, value):.{REMAINING_DIGITS}g}")
