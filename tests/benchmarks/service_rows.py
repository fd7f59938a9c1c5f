"""Fills the ledger of a service that runs, as if its nodes had been there for long.

What is filled in comes with its sums, which the service's own statement makes, all at once: its upkeep would take a
quarter of an hour for ten million rows, since it writes each of them once more.
"""

from __future__ import annotations

from service.ledger.sums import PARTS
from tests.benchmarks.service_host import Host

SLOTS = 1_000
"""Chains among which the intervals are shared out."""
INTERVAL_S = 10
"""The length of each."""
# Chains are checked at the end of a transaction, row by row: what is made here is a chain by construction.
_STATEMENTS = """
SET session_replication_role = replica;
INSERT INTO nodes (node_id, provider, pool, slots, peer_url, private_address, device, agent_version, agent_incarnation,
                   report_seq, state, first_seen_at, last_seen_at, ranks)
SELECT 'ledger-' || gen_random_uuid(), provider, pool, {slots}, peer_url, private_address, device, agent_version,
       gen_random_uuid(), 0, 'gone', first_seen_at, last_seen_at, '[]' FROM nodes LIMIT 1;
WITH new AS (
     SELECT node_id, provider, pool, now() - interval '10 years' AS since FROM nodes
      WHERE node_id LIKE 'ledger-%' AND NOT EXISTS (SELECT FROM leases WHERE leases.node_id = nodes.node_id)),
asked AS (
     INSERT INTO capacity_requests (provider, pool, machines, asked_by, asked_at, ended_at, end_reason)
     SELECT provider, pool, 1, 'the benchmark', since, since, 'filled in' FROM new RETURNING request_id),
came AS (
     INSERT INTO instances (request_id, provider, node_id, pool, known_since)
     SELECT request_id, provider, node_id, pool, since FROM asked, new RETURNING instance_id)
INSERT INTO leases (node_id, instance_id, pool, slots, started_at, ended_at, end_reason, pauses_due)
SELECT node_id, instance_id, pool, {slots}, since, now() - interval '1 day', 'filled in', '{{}}' FROM new, came;
INSERT INTO ledger (lease_id, slot, follows, starts_at, ends_at, cause, rolled)
SELECT lease_id, number % {slots},
       CASE WHEN number >= {slots} THEN started_at + (number / {slots}) * interval '{interval_s} seconds' END,
       started_at + (number / {slots}) * interval '{interval_s} seconds',
       started_at + (number / {slots} + 1) * interval '{interval_s} seconds',
       (ARRAY['productive', 'idle', 'bootstrap', 'lost'])[1 + (number / {slots}) % 4], true
  FROM generate_series(0, {rows} - 1) AS number,
       (SELECT max(lease_id) AS lease_id FROM leases) AS newest JOIN leases USING (lease_id);
"""
_SUMS = f"""
WITH chosen AS (SELECT * FROM ledger WHERE lease_id = (SELECT max(lease_id) FROM leases)),
{PARTS.replace(":sign", "1")}
"""


def add_intervals(place: Host, rows: int) -> None:
    """Add so many intervals, of one more lease, and their sums."""
    if rows <= 0:
        return
    with place.connect() as connection:
        connection.execute(_STATEMENTS.format(slots=min(SLOTS, rows), rows=rows, interval_s=INTERVAL_S).encode())
        connection.execute(_SUMS.encode())
    with place.connect() as connection:
        connection.execute("VACUUM (ANALYZE) ledger")


def unsummed(place: Host) -> int:
    """How many intervals are in no sum yet."""
    with place.connect() as connection:
        row = connection.execute("SELECT count(*) FROM ledger WHERE NOT rolled").fetchone()
    return int(row[0]) if row else 0
