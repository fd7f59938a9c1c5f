"""Stores what the ranks report, and drops the oldest."""

import json
from collections.abc import Sequence

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from agent.protocol import sync

_ADD = text(
    """
    INSERT INTO metrics (job_id, step, generation, numbers, at)
    SELECT job_id, step, generation, CAST(numbers AS jsonb), at FROM unnest(
           CAST(:job_id AS text[]), CAST(:step AS bigint[]), CAST(:generation AS bigint[]), CAST(:numbers AS text[]),
           CAST(:at AS timestamptz[])) AS said (job_id, step, generation, numbers, at)
    ON CONFLICT (job_id, step) DO UPDATE
       SET generation = excluded.generation, numbers = excluded.numbers, at = excluded.at
     WHERE metrics.generation < excluded.generation
    """
)
_TRIM = text(
    """
    DELETE FROM metrics USING (
        SELECT job_id, (SELECT step FROM metrics WHERE metrics.job_id = jobs.job_id
                         ORDER BY step DESC OFFSET :most LIMIT 1) AS cut
          FROM jobs WHERE highest_step >= :most) limits
     WHERE metrics.job_id = limits.job_id AND metrics.step <= limits.cut
    """
)


def store_metrics(session: Session, rows: Sequence[sync.MetricsRow]) -> None:
    """A step that was made again replaces the one before it; what is said twice changes nothing."""
    # One statement must not meet a step twice: the newest generation's goes in.
    newest = {(row.job_id, row.step): row for row in sorted(rows, key=lambda row: row.generation)}.values()
    if newest:
        values = {name: [getattr(row, name) for row in newest] for name in ("job_id", "step", "generation")}
        values |= {"numbers": [json.dumps(row.values) for row in newest], "at": [row.at_utc for row in newest]}
        session.execute(_ADD, values)


def trim_metrics(connection: Connection, *, most: int) -> int:
    """Keep the newest `most` steps of each job. Returns how many rows went."""
    return connection.execute(_TRIM, {"most": most}).rowcount
