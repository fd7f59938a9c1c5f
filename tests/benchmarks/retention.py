"""What it costs to delete old pieces of logs in batches, as the service does, and what a table by months would change.

Both tables lie in an embedded PostgreSQL of their own. Run from the root of the tree:
python -m tests.benchmarks.retention [--rows 5000000]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from service.db.engine import open_database
from service.db.upgrade import upgrade
from service.reconcilers.retention import BATCH, OLD_LOGS
from service.settings import ServiceSettings
from tests.benchmarks.circumstances import hardware
from tests.benchmarks.notice_report import percentile

CHARS = 200
JOBS = 100
MONTHS = 10
_MONTHLY = """
CREATE TABLE monthly_logs (LIKE rank_logs INCLUDING DEFAULTS) PARTITION BY RANGE (recorded_at);
ALTER TABLE monthly_logs ADD PRIMARY KEY (log_id, recorded_at);
ALTER TABLE monthly_logs ADD UNIQUE (job_id, generation, rank, start_offset, recorded_at);
CREATE INDEX ON monthly_logs (job_id, log_id)
"""
_FILL = """
INSERT INTO {table} (log_id, job_id, generation, rank, start_offset, text, recorded_at) {overriding}
SELECT n, 'job-' || n % {jobs}, 1, 0, n, repeat('x', {chars}),
       timestamptz '2026-01-01' + (n * {months} / {rows}) * interval '1 month'
  FROM generate_series(0, {rows} - 1) AS n
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.retention", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--batches", type=int, default=100, help="how many batches are deleted")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="liver-retention-"))
    folder.chmod(0o755)
    try:
        report = measure(folder, rows=options.rows, batches=options.batches)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(hardware("tests.benchmarks.retention") | report, indent=2))
    return 0


def measure(folder: Path, *, rows: int, batches: int) -> dict[str, Any]:
    """Fill both tables, then delete from each."""
    database = open_database(ServiceSettings(data_dir=folder))
    try:
        upgrade(database.engine)
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("SET statement_timeout = 0"))
            connection.execute(text("SET session_replication_role = replica"))
            return _measured(connection, rows=rows, batches=batches)
    finally:
        database.close()


def _measured(connection: Connection, *, rows: int, batches: int) -> dict[str, Any]:
    for statement in _MONTHLY.split(";"):
        connection.execute(text(statement))
    for month in range(MONTHS):
        connection.execute(
            text(
                f"CREATE TABLE logs_{month} PARTITION OF monthly_logs FOR VALUES "
                f"FROM ('2026-{month + 1:02}-01Z') TO ('2026-{month + 2:02}-01Z')"
            )
        )
    fills = {
        table: _timed(
            connection,
            _FILL.format(table=table, rows=rows, jobs=JOBS, chars=CHARS, months=MONTHS, overriding=overriding),
        )
        for table, overriding in (("rank_logs", "OVERRIDING SYSTEM VALUE"), ("monthly_logs", ""))
    }
    connection.execute(text("VACUUM (ANALYZE)"))
    values = {"batch": BATCH, "before": "2026-06-01Z"}
    times_ms = []
    for _ in range(batches):
        began = time.monotonic()
        assert connection.execute(OLD_LOGS, values).rowcount == BATCH
        times_ms.append((time.monotonic() - began) * 1e3)
    return {
        "rows": rows,
        "fill_s": {name: round(value, 1) for name, value in fills.items()},
        "batch_rows": BATCH,
        "batch_ms": {"p50": round(percentile(sorted(times_ms), 50) or 0, 1), "most": round(max(times_ms), 1)},
        "vacuum_s": round(_timed(connection, "VACUUM rank_logs"), 2),
        "drop_ms": round(1e3 * _timed(connection, "DROP TABLE logs_0"), 1),
    }


def _timed(connection: Connection, statement: str) -> float:
    began = time.monotonic()
    connection.execute(text(statement))
    return time.monotonic() - began


if __name__ == "__main__":
    raise SystemExit(main())
