"""Stores what the ranks report."""

import json
from collections.abc import Sequence

from sqlalchemy import text
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


def store_metrics(session: Session, rows: Sequence[sync.MetricsRow]) -> None:
    """A step that was made again replaces the one before it; what is said twice changes nothing."""
    # One statement must not meet a step twice: the newest generation's goes in.
    newest = {(row.job_id, row.step): row for row in sorted(rows, key=lambda row: row.generation)}.values()
    if newest:
        values = {name: [getattr(row, name) for row in newest] for name in ("job_id", "step", "generation")}
        values |= {"numbers": [json.dumps(row.values) for row in newest], "at": [row.at_utc for row in newest]}
        session.execute(_ADD, values)
