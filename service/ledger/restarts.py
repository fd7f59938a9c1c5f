"""The counterfactual: what it would have cost to restart a job from a checkpoint wherever it was handed over live.

Only what this job itself was seen to do counts: its own saves and its own starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from agent.protocol.values import HandoffState
from service.handoffs.tables import HandoffRow
from service.jobs.tables import CheckpointRow, GenerationRow, SourceKind
from service.ledger.queries import CauseSum
from service.ledger.tables import Cause

SEEN_MAX = 1_000
"""The newest of each kind count."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a job was seen to do. `moves`: ranks before and after each live handoff. `saves_s`: of its checkpoints.
    `restarts_s`, `starts_s`: from a start, with or without a checkpoint, to its first step."""

    moves: Sequence[tuple[int, int]]
    saves_s: Sequence[float]
    restarts_s: Sequence[float]
    starts_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Restarts:
    """The estimate; see `RestartsOut`."""

    estimate: str
    handoffs: int
    handoffs_slot_seconds: float
    save_s: float | None
    start_s: float | None
    slot_seconds: float | None
    dollars: float | None


def observed(session: Session, job_id: str) -> Observed:
    """Read it."""
    source, target = HandoffRow.source["members"], HandoffRow.target["members"]
    moves = (
        select(func.jsonb_array_length(source), func.jsonb_array_length(target))
        .where(HandoffRow.job_id == job_id, HandoffRow.state == HandoffState.ACTIVE, HandoffRow.source.is_not(None))
        .order_by(HandoffRow.opened_at.desc())
    )
    saves = (
        select(CheckpointRow.seconds)
        .where(CheckpointRow.job_id == job_id, CheckpointRow.seconds.is_not(None))
        .order_by(CheckpointRow.finished_at.desc())
    )
    starts = (
        select(GenerationRow)
        .where(GenerationRow.job_id == job_id, GenerationRow.first_step_at.is_not(None))
        .where(GenerationRow.source_kind != SourceKind.HANDOFF)
        .order_by(GenerationRow.generation.desc())
    )
    seconds: dict[SourceKind, list[float]] = {kind: [] for kind in SourceKind}
    for row in session.scalars(starts.limit(SEEN_MAX)):
        if row.first_step_at is not None:
            seconds[SourceKind(row.source_kind)].append((row.first_step_at - row.created_at).total_seconds())
    return Observed(
        moves=[(before, after) for before, after in session.execute(moves.limit(SEEN_MAX))],
        saves_s=[float(value) for value in session.scalars(saves.limit(SEEN_MAX)) if value is not None],
        restarts_s=seconds[SourceKind.CHECKPOINT],
        starts_s=seconds[SourceKind.INIT],
    )


def restarts_instead(seen: Observed, sums: Sequence[CauseSum]) -> Restarts:
    """What each move would have cost as a checkpoint of the world before and a start of the world after. `sums`: what
    the ledger has of the job."""
    starts = seen.restarts_s or seen.starts_s
    save_s = median(seen.saves_s) if seen.saves_s else None
    start_s = median(starts) if starts else None
    slot_seconds = dollars = None
    if save_s is not None and start_s is not None:
        slot_seconds = sum(before * save_s + after * start_s for before, after in seen.moves)
        dollars = slot_seconds * _usd_per_slot_second(sums)
    return Restarts(
        estimate=_in_words(seen),
        handoffs=len(seen.moves),
        handoffs_slot_seconds=sum(item.slot_seconds for item in sums if item.cause is Cause.PAUSE),
        save_s=save_s,
        start_s=start_s,
        slot_seconds=slot_seconds,
        dollars=dollars,
    )


def _usd_per_slot_second(sums: Sequence[CauseSum]) -> float:
    total = sum(item.slot_seconds for item in sums)
    return sum(item.dollars for item in sums) / total if total else 0.0


def _in_words(seen: Observed) -> str:
    if not seen.saves_s or not (seen.restarts_s or seen.starts_s):
        missing = "checkpoint" if not seen.saves_s else "start"
        return f"no estimate yet: this job has not been seen to complete a {missing}"
    kind, count = ("restart", len(seen.restarts_s)) if seen.restarts_s else ("first start", len(seen.starts_s))
    return (
        f"an estimate, not measured: each move as a checkpoint (median of {len(seen.saves_s)} of this job's own) and a "
        f"start (median of {count} of its own: {kind}), of all ranks; without steps lost, and without waiting for nodes"
    )
