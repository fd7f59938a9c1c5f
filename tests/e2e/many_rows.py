"""A job on a thousand nodes with thirty days behind it, written as rows into a service's database: what a month of
reports would have left there, without the month. And changes of it, as reports make them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from psycopg import Connection
from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import Session

from liver_core.layout import Member, ParallelLayout, Roster
from service.db.roster_rows import stored_roster
from service.handoffs.tables import HandoffRow
from service.ledger import sums
from service.notices.tables import NoticeRow
from tests.benchmarks.service_host import Host

NODES, SLOTS, POOLS, DAYS = 1_000, 8, 12, 30
WORLD = ParallelLayout(tp=8, pp=8, dp=NODES * SLOTS // 64)
STEP_S = 10
MOVES = 240
CHANGED_AT_ONCE = 100
"""Nodes that change their state in one update."""

# Chains are checked at the end of a transaction, row by row: what is made here is a chain by construction.
_NODES = f"""
SET session_replication_role = replica;
INSERT INTO nodes (node_id, provider, pool, slots, peer_url, private_address, device, agent_version, agent_incarnation,
                   report_seq, state, first_seen_at, last_seen_at, zone, ranks)
SELECT 'big-' || lpad(number::text, 4, '0'), provider, 'pool-' || lpad((number % {POOLS})::text, 2, '0'), {SLOTS},
       peer_url, private_address, device, agent_version, gen_random_uuid(), 0, 'ready', now() - interval '{DAYS} days',
       now(), 'zone-' || number % 3, '[]'
  FROM nodes, generate_series(1, {NODES}) AS number WHERE node_id = 'node-a';
INSERT INTO pool_prices (pool, effective_from, price_usd_per_hour, on_demand_usd_per_hour)
SELECT DISTINCT pool, now() - interval '{DAYS} days', 20, 55 FROM nodes WHERE node_id LIKE 'big-%';
WITH asked AS (
     INSERT INTO capacity_requests (provider, pool, machines, asked_by, asked_at, ended_at, end_reason)
     SELECT provider, pool, 1, 'a month', first_seen_at, first_seen_at, 'filled in' FROM nodes
      WHERE node_id = 'big-0001' RETURNING request_id),
came AS (
     INSERT INTO instances (request_id, provider, node_id, pool, known_since)
     SELECT request_id, provider, node_id, pool, first_seen_at FROM asked, nodes WHERE node_id LIKE 'big-%'
     RETURNING instance_id, node_id, pool, known_since)
INSERT INTO leases (node_id, instance_id, pool, slots, started_at, end_reason, pauses_due)
SELECT node_id, instance_id, pool, {SLOTS}, known_since, '', '{{}}' FROM came;
"""
_MONTH = f"""
SET session_replication_role = replica;
INSERT INTO ledger (lease_id, slot, follows, starts_at, ends_at, cause, job_id, generation, rolled)
SELECT lease_id, slot, CASE WHEN day > 0 THEN started_at + day * interval '1 day' END,
       started_at + day * interval '1 day', started_at + (day + 1) * interval '1 day',
       CASE WHEN (day * 7 + lease_id) %% 19 = 0 THEN (ARRAY['pause', 'recompute', 'lost'])[1 + day %% 3]
            ELSE 'productive' END, %(job_id)s, 1 + day, false
  FROM leases, (VALUES (0)) AS one (slot), generate_series(0, {DAYS} - 1) AS day
 WHERE node_id LIKE 'big-%%';
INSERT INTO steps (job_id, generation, step, seconds, loss, tokens, finished_at)
SELECT %(job_id)s, 1, 100 + number, {STEP_S}, 2.0 + 9.0 / (1 + number / 2000.0) + 0.02 * sin(number), 4000000,
       now() - interval '{DAYS} days' + number * interval '{STEP_S} seconds'
  FROM generate_series(1, {DAYS * 86_400 // STEP_S}) AS number;
INSERT INTO notices (node_id, lease_id, kind, source, deadline_at, first_seen_at, recorded_at, raw, job_ids)
SELECT node_id, lease_id, 'interruption', 'aws-imds', at + interval '2 minutes', at, at, '{{}}',
       jsonb_build_array(%(job_id)s::text)
  FROM (SELECT *, started_at + (row_number() OVER (ORDER BY lease_id)) * interval '170 minutes' AS at
          FROM leases WHERE node_id LIKE 'big-%%' ORDER BY lease_id LIMIT {MOVES}) AS gone;
UPDATE notices SET occurrence_id = notice_id WHERE occurrence_id IS NULL;
"""


def fill(place: Host, job_id: str) -> None:
    """A thousand nodes, a world of theirs, steps, notices and handoffs of thirty days, and the ledger of these days for
    one slot of each node: pages read its sums by hour, pool and cause, whose number does not depend on slots."""
    with place.connect() as connection:
        connection.execute(_NODES.encode())
        for statement in _MONTH.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode(), {"job_id": job_id} if "%(" in statement else None)
        _put_world(connection, job_id)
        connection.execute("VACUUM (ANALYZE)")
    engine = create_engine("postgresql+psycopg://", creator=place.connect)
    with Session(engine) as session:
        session.execute(text("SET session_replication_role = replica"))
        session.add_all(_moves(session, job_id))
        session.flush()
        while sums.roll(session, before=datetime.now(UTC), hours_max=10_000_000) + sums.merge(session):
            session.commit()
    engine.dispose()
    with place.connect() as connection:
        connection.execute("VACUUM (ANALYZE)")


def _moves(session: Session, job_id: str) -> list[HandoffRow]:
    """One handoff for each notice of these nodes."""
    phases = {"plan": 0.4, "stream": 18.0, "to_ready": 22.0, "to_boundary": 4.0, "to_active": 0.5}
    measures = {"phases_s": phases, "pause_s": 0.4, "bytes_moved": 84_000_000_000, "notice_to_safe_s": 27.0}
    few = {"members": [{"node_id": f"big-{number:04}", "slot": 0} for number in range(1, 5)]}
    notices = session.scalars(select(NoticeRow).where(NoticeRow.node_id.like("big-%")))
    return [
        HandoffRow(
            handoff_id=uuid4(), job_id=job_id, parent=1, generation=1_000 + notice.notice_id, proposer=notice.node_id,
            cause="notice", state="aborted" if notice.notice_id % 17 == 0 else "active", rung="live", source=None,
            target=few, source_layout="TP8xPP8xDP125", target_layout="TP8xPP8xDP124", leaving=[notice.node_id],
            reason="spot notice", opened_at=notice.first_seen_at + timedelta(seconds=1), measures=measures,
            changed_at=notice.first_seen_at + timedelta(seconds=30), pause_charged_s=0.4, mirror_seq=1,
            recorded_at=notice.first_seen_at + timedelta(seconds=30),
        )
        for notice in notices
    ]  # fmt: skip


def _put_world(connection: Connection[Any], job_id: str) -> None:
    """The job's next generation holds all slots of the thousand nodes, and every rank trains."""
    names = [f"big-{number:04}" for number in range(1, NODES + 1)]
    row = connection.execute("SELECT active_generation, last_step FROM jobs WHERE job_id = %s", (job_id,)).fetchone()
    assert row is not None
    generation, step = row[0] + 1, row[1]
    members = tuple(Member(node_id=name, slot=slot) for name in names for slot in range(SLOTS))
    world = Roster(job_id=job_id, generation=generation, layout=WORLD, members=members)
    connection.execute(
        "INSERT INTO job_generations (job_id, generation, origin_id, parent, source_kind, layout, nodes, roster,"
        " reason, lost_steps, repeats_until, created_at, first_step_at) VALUES (%s, %s, gen_random_uuid(), %s,"
        " 'handoff', %s, %s, %s, 'spot notice', 0, 0, now() - interval '1 hour', now() - interval '1 hour')",
        (job_id, generation, generation - 1, str(WORLD), NODES, json.dumps(stored_roster(world))),
    )
    rank = {"job_id": job_id, "generation": generation, "stage": "training", "step": step, "pid": 1, "reason": None}
    with connection.cursor() as cursor:
        cursor.executemany(
            "UPDATE nodes SET ranks = %s WHERE node_id = %s",
            [
                (json.dumps([rank | {"rank": at * SLOTS + slot, "slot": slot} for slot in range(SLOTS)]), name)
                for at, name in enumerate(names)
            ],
        )
        cursor.execute("DELETE FROM job_members WHERE job_id = %s", (job_id,))
        cursor.executemany(
            "INSERT INTO job_members (job_id, node_id, role) VALUES (%s, %s, 'member')",
            [(job_id, name) for name in names],
        )
    connection.execute(
        "UPDATE jobs SET active_generation = %s, next_generation = %s, created_at = now() - %s * interval '1 day',"
        " spec = jsonb_set(spec, '{stop,steps}', '1000000') WHERE job_id = %s",
        (generation, generation + 1, DAYS, job_id),
    )


def change(place: Host, job_id: str, number: int) -> None:
    """What a second brings: some nodes fall silent or are back, and the job has made a step."""
    with place.connect() as connection:
        connection.execute(
            "UPDATE nodes SET state = CASE state WHEN 'ready' THEN 'silent' ELSE 'ready' END, last_seen_at = now()"
            " WHERE node_id LIKE 'big-%%' AND (right(node_id, 4)::int + %s) %% %s = 0",
            (number, NODES // CHANGED_AT_ONCE),
        )
        connection.execute(
            "WITH made AS (UPDATE jobs SET last_step = last_step + 1, last_step_at = now() WHERE job_id = %(job_id)s"
            " RETURNING active_generation, last_step)"
            " INSERT INTO steps (job_id, generation, step, seconds, loss, tokens, finished_at)"
            " SELECT %(job_id)s, active_generation, 1000000 + last_step, 10, 2.1, 4000000, now() FROM made",
            {"job_id": job_id},
        )
