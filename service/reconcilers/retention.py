"""What is summed, and what is deleted, and when: what a job has too much of, and what is older than the settings say.

Each statement takes a bounded number of rows, and none reads more because there is a longer history. Nothing goes
that a job which has not ended needs, or a lease that is open; and no sum of the ledger.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from service.capacity.wants import end_and_drop
from service.decisions.operations import trim_decisions
from service.ledger import egress, sums
from service.repeats.operations import trim
from service.sessions.operations import expire_sessions
from service.settings import ServiceSettings
from service.sync import held

BATCH = 5_000
"""Rows that one statement deletes at most."""
_PER_LOOK = 64
_LOGS_OVER = 1.1
"""How much more of a job's logs than its limit there may be: finding the newest of them takes reading all."""

# Only jobs that have not ended get more rows. Some at a time, drawn anew in each look.
_LIVING = f"SELECT * FROM jobs WHERE due_at IS NOT NULL ORDER BY random() LIMIT {_PER_LOOK}"


def _over(table: str, key: str) -> TextClause:
    """Delete what lies behind the newest `:keep` rows of a job, by `key`. An index has both: only it is read."""
    return text(
        f"""
        DELETE FROM {table} WHERE ctid = ANY (ARRAY (
            SELECT old.ctid FROM ({_LIVING}) AS living
             CROSS JOIN LATERAL (SELECT {key} FROM {table} WHERE job_id = living.job_id
                                  ORDER BY {key} DESC OFFSET :keep LIMIT 1) AS cut
             CROSS JOIN LATERAL (SELECT ctid FROM {table} WHERE job_id = living.job_id AND {key} <= cut.{key}
                                  LIMIT :batch) AS old
             LIMIT :batch))
        """
    )


_STEPS, _METRICS = _over("steps", "finished_at"), _over("metrics", "step")
# Each piece is counted once, when it is new.
_COUNT_LOGS = text(
    f"""
    INSERT INTO log_sizes (job_id, chars, counted_to)
    SELECT living.job_id, coalesce(log_sizes.chars, 0) + new.chars, new.counted_to
      FROM ({_LIVING}) AS living LEFT JOIN log_sizes ON log_sizes.job_id = living.job_id
     CROSS JOIN LATERAL (SELECT sum(length(text)) AS chars, max(log_id) AS counted_to FROM rank_logs
                          WHERE job_id = living.job_id AND log_id > coalesce(log_sizes.counted_to, 0)) AS new
     WHERE new.chars IS NOT NULL
    ON CONFLICT (job_id) DO UPDATE SET chars = excluded.chars, counted_to = excluded.counted_to
    """
)
_LONG_LOGS = text("SELECT job_id FROM log_sizes WHERE chars > :log_chars_most LIMIT 1")
_CUT_LOGS = text(
    """
    DELETE FROM rank_logs WHERE job_id = :job_id AND log_id <= (
        SELECT max(log_id) FROM (
            SELECT log_id, sum(length(text)) OVER (ORDER BY log_id DESC) AS chars FROM rank_logs
             WHERE job_id = :job_id) AS running
         WHERE chars > :log_chars_max)
    """
)
_COUNT_AGAIN = text(
    """
    UPDATE log_sizes SET chars = found.chars, counted_to = found.counted_to
      FROM (SELECT coalesce(sum(length(text)), 0) AS chars, coalesce(max(log_id), 0) AS counted_to FROM rank_logs
             WHERE job_id = :job_id) AS found
     WHERE job_id = :job_id
    """
)


def _oldest(table: str, key: str, at: str, *, only: str = "true") -> TextClause:
    """Delete of the oldest rows, by a key that grows with time, those from before `before`. One is read if none is."""
    return text(
        f"""
        DELETE FROM {table} WHERE ctid = ANY (ARRAY (
            SELECT place FROM (SELECT ctid AS place, * FROM {table}
                                WHERE (SELECT {at} < :before FROM {table} ORDER BY {key} LIMIT 1)
                                ORDER BY {key} LIMIT :batch) AS oldest
             WHERE {at} < :before AND {only}))
        """
    )


OLD_LOGS = _oldest("rank_logs", "log_id", "recorded_at")
_OLD_AUDIT = _oldest("audit", "audit_id", "at")
# The newest decision of a job is what the next one is compared with.
_OLD_DECISIONS = _oldest(
    "decisions",
    "decision_id",
    "decided_at",
    only="""(decision_id < (SELECT max(decision_id) FROM decisions AS newer WHERE newer.job_id = oldest.job_id)
                  OR (SELECT due_at IS NULL FROM jobs WHERE jobs.job_id = oldest.job_id))""",
)
_OLD_NOTICES = text(
    """
    DELETE FROM notices WHERE notice_id IN (
        SELECT notice_id FROM notices JOIN leases ON leases.lease_id = notices.lease_id
         WHERE notices.recorded_at < :before AND leases.ended_at < :before ORDER BY notices.recorded_at LIMIT :batch)
    """
)
_OLD_INCIDENTS = _oldest("job_incidents", "incident_id", "began_at", only="over_at < :before")
_OLD_HEARINGS = _oldest("notice_hearings", "hearing_id", "heard_at")
# What became of an attempt that changed nothing is of no use later.
_OLD_HANDOFFS = text(
    """
    DELETE FROM handoffs WHERE handoff_id IN (
        SELECT handoff_id FROM handoffs WHERE state IN ('aborted', 'broken') AND changed_at < :before
         ORDER BY changed_at LIMIT :batch)
    """
)
# The request of a machine that is a node, or was one a while ago and may come back, says where that comes from.
_OLD_REQUESTS = text(
    """
    DELETE FROM capacity_requests WHERE request_id = ANY (ARRAY (
        SELECT request_id FROM capacity_requests AS old WHERE ended_at < :before AND NOT EXISTS (
               SELECT FROM instances JOIN leases ON leases.node_id = instances.node_id
                  AND (leases.ended_at IS NULL OR leases.ended_at >= :before)
                WHERE instances.request_id = old.request_id AND instances.released_at IS NULL)
         LIMIT :batch))
    """
)
_OLD_JOBS = text(
    f"""
    SELECT job_id FROM jobs WHERE due_at IS NULL AND (emptied_at IS NULL OR emptied_at < state_changed_at)
       AND state_changed_at < :before ORDER BY state_changed_at LIMIT {_PER_LOOK} FOR NO KEY UPDATE SKIP LOCKED
    """
)
_OF_OLD_JOBS = tuple(
    text(f"DELETE FROM {table} WHERE ctid = ANY (ARRAY (SELECT ctid FROM {table} WHERE {only} LIMIT :batch))")
    for table, only in (
        ("steps", "job_id = ANY(:job_ids)"),
        ("metrics", "job_id = ANY(:job_ids)"),
        ("job_grants", "job_id = ANY(:job_ids) AND role IS NULL AND ends_at < :before"),
    )
)
_EMPTIED = text("UPDATE jobs SET emptied_at = :now WHERE job_id = ANY(:job_ids)")


Work = Callable[[Session, ServiceSettings, datetime, int], int]


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of rows. `work` does a part of at most so much, and returns how many rows it took, until there are none.
    `most`: how much a part is, unless that takes too long."""

    name: str
    work: Work
    most: int = BATCH


def _above(statement: TextClause, setting: str) -> Work:
    return lambda session, settings, now, most: _rows(session, statement, keep=getattr(settings, setting), batch=most)


def _age(statement: TextClause, setting: str) -> Work:
    def work(session: Session, settings: ServiceSettings, now: datetime, most: int) -> int:
        before = now - timedelta(days=getattr(settings, setting))
        return _rows(session, statement, batch=most, before=before)

    return work


def _sum_up(session: Session, settings: ServiceSettings, now: datetime, most: int) -> int:
    return sums.roll(session, before=now - sums.ROLL_AFTER, hours_max=most)


def _sum_up_egress(session: Session, settings: ServiceSettings, now: datetime, most: int) -> int:
    return egress.roll_egress(session, before=now - sums.ROLL_AFTER, most=most)


def _long_logs(session: Session, settings: ServiceSettings, now: datetime, most: int) -> int:
    session.execute(_COUNT_LOGS)
    chars_max = settings.log_chars_max
    job_id = session.execute(_LONG_LOGS, {"log_chars_most": int(chars_max * _LOGS_OVER)}).scalar_one_or_none()
    if job_id is None:
        return 0
    gone = _rows(session, _CUT_LOGS, job_id=job_id, log_chars_max=chars_max)
    session.execute(_COUNT_AGAIN, {"job_id": job_id})
    return gone


def _old_jobs(session: Session, settings: ServiceSettings, now: datetime, most: int) -> int:
    before = now - timedelta(days=settings.steps_kept_days)
    values = {"job_ids": list(session.execute(_OLD_JOBS, {"before": before}).scalars()), "batch": most}
    steps, metrics, grants = _OF_OLD_JOBS
    gone = _rows(session, steps, **values) + _rows(session, metrics, **values)
    gone += _rows(session, grants, before=before, **values)
    if gone == 0:
        session.execute(_EMPTIED, {"job_ids": values["job_ids"], "now": now})
    return gone


def _old_intervals(session: Session, settings: ServiceSettings, now: datetime, most: int) -> int:
    return sums.forget(session, before=now - timedelta(days=settings.intervals_kept_days), most=most)


def _rows(session: Session, statement: TextClause, **values: object) -> int:
    return session.connection().execute(statement, values).rowcount


SUMS = (
    Task("intervals that have ended", _sum_up, sums.HOURS_MAX),
    Task("sums of intervals", lambda session, settings, now, most: sums.merge(session, most=most), sums.MERGED_MAX),
    Task("what left pools", _sum_up_egress, egress.ROLLED_MAX),
)
TASKS = (
    Task("steps above the limit", _above(_STEPS, "step_rows_max")),
    Task("metrics above the limit", _above(_METRICS, "metrics_rows_max")),
    Task("decisions above the limit", lambda session, settings, now, most: trim_decisions(session, most=most)),
    Task("pieces of logs above the limit", _long_logs),
    Task("old pieces of logs", _age(OLD_LOGS, "logs_kept_days")),
    Task("old audit rows", _age(_OLD_AUDIT, "audit_kept_days")),
    Task("old decisions", _age(_OLD_DECISIONS, "decisions_kept_days")),
    Task("old notices", _age(_OLD_NOTICES, "notices_kept_days")),
    Task("old incidents without a notice", _age(_OLD_INCIDENTS, "notices_kept_days")),
    Task("old hearings of notices", _age(_OLD_HEARINGS, "hearings_kept_days")),
    Task("old attempts of handoffs", _age(_OLD_HANDOFFS, "handoffs_kept_days")),
    Task("old requests for machines", _age(_OLD_REQUESTS, "requests_kept_days")),
    Task("steps, metrics and grants of jobs that ended long ago", _old_jobs),
    Task("old intervals", _old_intervals),
    Task(
        "facts that waited too long",
        lambda session, settings, now, most: held.expire(session.connection(), now=now, most=most),
    ),
    Task(
        "requests for machines of policies",
        lambda session, settings, now, most: end_and_drop(session, now=now, most=most),
    ),
    Task("browser sessions", lambda session, settings, now, most: expire_sessions(session, now=now, most=most)),
    Task("answers kept for repeats", lambda session, settings, now, most: trim(session, now=now, most=most)),
)
