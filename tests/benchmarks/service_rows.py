"""Fills the ledger of a service that runs, as if its nodes had been there for long."""

from __future__ import annotations

from tests.benchmarks.service_host import Host

SLOTS = 1_000
"""Chains among which the intervals are shared out."""
# Chains are checked at the end of a transaction, row by row: what is made here is a chain by construction.
_STATEMENTS = """
SET session_replication_role = replica;
INSERT INTO nodes (node_id, provider, pool, slots, peer_url, private_address, device, agent_version, agent_incarnation,
                   report_seq, state, first_seen_at, last_seen_at, ranks)
SELECT 'ledger-' || gen_random_uuid(), provider, pool, {slots}, peer_url, private_address, device, agent_version,
       gen_random_uuid(), 0, 'gone', first_seen_at, last_seen_at, '[]' FROM nodes LIMIT 1;
INSERT INTO leases (node_id, pool, slots, started_at, ended_at, end_reason)
SELECT node_id, pool, {slots}, now() - interval '10 years', now() - interval '1 day', 'filled in'
  FROM nodes WHERE node_id LIKE 'ledger-%' ORDER BY node_id DESC LIMIT 1;
INSERT INTO ledger (lease_id, slot, follows, starts_at, ends_at, cause)
SELECT lease_id, number % {slots},
       CASE WHEN number >= {slots} THEN started_at + (number / {slots}) * interval '10 seconds' END,
       started_at + (number / {slots}) * interval '10 seconds',
       started_at + (number / {slots} + 1) * interval '10 seconds',
       (ARRAY['productive', 'idle', 'bootstrap', 'lost'])[1 + (number / {slots}) % 4]
  FROM generate_series(0, {rows} - 1) AS number,
       (SELECT max(lease_id) AS lease_id FROM leases) AS newest JOIN leases USING (lease_id);
"""


def add_intervals(place: Host, rows: int) -> None:
    """Add so many intervals, of one more lease."""
    if rows <= 0:
        return
    with place.connect() as connection:
        connection.execute(_STATEMENTS.format(slots=min(SLOTS, rows), rows=rows).encode())
    with place.connect() as connection:
        connection.execute("VACUUM (ANALYZE) ledger")
