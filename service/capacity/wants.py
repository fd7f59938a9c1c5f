"""Requests for machines that a job's policy wants: written, ended and dropped here, and filled by nobody yet.

A pool from which nothing came for a while counts as having nothing to offer for a time, so that the policy looks
elsewhere, also on demand.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, select, text
from sqlalchemy.orm import Session

from agent.protocol.sync import Provider
from service.capacity.tables import InstanceRow, RequestRow
from service.planner.weighing.wanted import PoolWant
from service.policy.types import Market

SHORT_AFTER_ACQUIRES, SHORT_AFTER_S_LEAST = 5, 60.0
"""Nothing came if none did in so many times `policy.acquire_s`, or in so many seconds if that is longer."""
SHORT_FOR = timedelta(minutes=30)
KEPT_FOR = timedelta(hours=1)
HAS_THEM, NOTHING_CAME = "the job has them, or wants them no longer", "nothing came in time"
JOB_ENDED = "the job has ended"
# The condition on `market` is that of a partial index: requests that people made are not read.
_END_ALL = text(
    """
    UPDATE capacity_requests SET ended_at = greatest(asked_at, :now), end_reason = :reason
     WHERE request_id = ANY (ARRAY (
           SELECT request_id FROM capacity_requests AS wanted
            WHERE market IS NOT NULL AND ended_at IS NULL AND NOT EXISTS (
                  SELECT FROM jobs WHERE job_id = right(wanted.asked_by, -length(:asker)) AND due_at IS NOT NULL)
            LIMIT :most FOR UPDATE SKIP LOCKED))
    """
)
_DROP = text(
    """
    DELETE FROM capacity_requests
     WHERE request_id = ANY (ARRAY (
           SELECT request_id FROM capacity_requests AS old
            WHERE market IS NOT NULL AND ended_at < :before AND provider_id IS NULL
              AND NOT EXISTS (SELECT FROM instances WHERE instances.request_id = old.request_id)
            LIMIT :most FOR UPDATE SKIP LOCKED))
    """
)


def store_wants(session: Session, job_id: str, wants: Sequence[PoolWant], *, acquire_s: float, now: datetime) -> None:
    """The job's open requests become what it wants now. Of spot nodes that do not come, the request ends."""
    asked_by = _asked_by(job_id)
    wanted = {(each.pool, each.place, each.market.value): each.missing for each in wants if each.missing}
    patience = timedelta(seconds=max(SHORT_AFTER_S_LEAST, SHORT_AFTER_ACQUIRES * acquire_s))
    open_rows = select(RequestRow).where(*_of_policy(job_id), RequestRow.ended_at.is_(None))
    for row in session.scalars(open_rows.with_for_update()):
        missing = wanted.pop((row.pool, row.place, row.market or ""), 0)
        if not missing:
            _end(row, HAS_THEM, now=now)
        elif missing < row.machines:
            # Some came: the others may too.
            row.machines, row.asked_at = missing, now
        elif row.market == Market.SPOT and now - row.asked_at >= patience:
            _end(row, NOTHING_CAME, now=now)
        else:
            row.machines = missing
    for (pool, place, market), missing in wanted.items():
        session.add(
            RequestRow(
                provider=_provider_of(session, pool), pool=pool, place=place, market=market, machines=missing,
                asked_by=asked_by, asked_at=now,
            )
        )  # fmt: skip


def end_and_drop(session: Session, *, now: datetime, most: int) -> int:
    """End the requests of jobs that have ended, however they did, or are gone. Drop those that ended long ago and that
    no machine came from; returns how many. At most `most` of each; one that a job is changing is left for later."""
    connection = session.connection()
    connection.execute(_END_ALL, {"asker": _asked_by(""), "reason": JOB_ENDED, "now": now, "most": most})
    return connection.execute(_DROP, {"before": now - KEPT_FOR, "most": most}).rowcount


def short_pools(session: Session, job_id: str, pools: Collection[str], *, now: datetime) -> frozenset[str]:
    """Pools from which the job wanted spot nodes lately, and got none."""
    rows = select(RequestRow.pool).where(
        *_of_policy(job_id),
        RequestRow.end_reason == NOTHING_CAME,
        RequestRow.ended_at > now - SHORT_FOR,
    )
    return frozenset(session.scalars(rows)) & frozenset(pools)


def _end(row: RequestRow, reason: str, *, now: datetime) -> None:
    # Another replica may have asked, and its reading of the database's clock may be a little ahead of this one's.
    row.ended_at, row.end_reason = max(row.asked_at, now), reason


def _of_policy(job_id: str) -> tuple[ColumnElement[bool], ...]:
    return RequestRow.asked_by == _asked_by(job_id), RequestRow.market.is_not(None)


def _asked_by(job_id: str) -> str:
    return f"policy of job {job_id}"


def _provider_of(session: Session, pool: str) -> str:
    """Of the pool's newest machine; none where it never had any."""
    newest = select(InstanceRow.provider).where(InstanceRow.pool == pool).order_by(InstanceRow.instance_id.desc())
    return session.scalars(newest.limit(1)).one_or_none() or Provider.NONE.value
