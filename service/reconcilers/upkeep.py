"""Deletes the oldest step rows, metrics and rank logs of each job above their limits, old decisions, answers kept for
repeats, and facts that waited too long.
"""

from sqlalchemy import text

from service.context import Context
from service.decisions.operations import trim_decisions
from service.metrics.operations import trim_metrics
from service.repeats.operations import trim
from service.sync import held

LOCK_KEY = 0x11FE_0002

_TRIM_STEPS = text(
    """
    DELETE FROM steps USING (
        SELECT job_id, finished_at AS cut FROM (
            SELECT job_id, finished_at, row_number() OVER (PARTITION BY job_id ORDER BY finished_at DESC) AS place
              FROM steps WHERE job_id IN (SELECT job_id FROM jobs WHERE highest_step > :most)) ranked
         WHERE place = :most) limits
     WHERE steps.job_id = limits.job_id AND steps.finished_at < limits.cut
    """
)
_TRIM_LOGS = text(
    """
    DELETE FROM rank_logs USING (
        SELECT job_id, max(log_id) AS cut FROM (
            SELECT job_id, log_id, sum(length(text)) OVER (PARTITION BY job_id ORDER BY log_id DESC) AS chars
              FROM rank_logs) running
         WHERE chars > :most GROUP BY job_id) limits
     WHERE rank_logs.job_id = limits.job_id AND rank_logs.log_id <= limits.cut
    """
)


def tick(context: Context) -> int:
    """Delete the rows above the limits. Returns how many. Only one replica at a time does it."""
    settings = context.settings
    with context.sessions.begin() as session:
        if not session.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": LOCK_KEY}).scalar_one():
            return 0
        session.execute(text("SET LOCAL statement_timeout = '60s'"))
        steps = session.connection().execute(_TRIM_STEPS, {"most": settings.step_rows_max})
        logs = session.connection().execute(_TRIM_LOGS, {"most": settings.log_chars_max})
        steps_and_logs = steps.rowcount + logs.rowcount
        metrics = trim_metrics(session.connection(), most=settings.metrics_rows_max)
        now = context.clock()
        waited = held.expire(session.connection(), now=now)
        return steps_and_logs + metrics + waited + trim(session, now=now) + trim_decisions(session)
