"""No loop and no page reads more rows because a service has run for long.

What each really reads is counted by PostgreSQL itself, once with little and once with much history.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from service.db.engine import Database
from service.notices.queries import open_notices
from service.reconcilers import jobs, upkeep
from tests.service.conftest import bearer
from tests.service.reconcilers.conftest import Fleet

PAST = 4_000
A_PAGE = 200
"""A page shows up to 100 rows, and what belongs to them is read with it."""
# Copies of one row each, with other keys: as if there had been so many jobs and nodes before. Not of ledger_egress: its
# rows, one for each handoff that moved something, are all read for the ledger.
_COPIES = {
    "jobs": {"job_id": "'old-' || n", "state": "'finished'", "due_at": "null", "active_generation": "null",
             "created_at": "created_at - n * interval '1 s'", "emptied_at": "state_changed_at + interval '1 s'"},
    "job_generations": {"job_id": "'old-' || n", "origin_id": "gen_random_uuid()"},
    "handoffs": {"job_id": "'old-' || n", "handoff_id": "gen_random_uuid()", "state": "'aborted'",
                 "opened_at": "opened_at - n * interval '1 s'"},
    "job_grants": {"job_id": "'old-' || n", "grant_id": "-n", "role": "null", "ends_at": "at"},
    "steps": {"job_id": "'old-' || n"},
    "metrics": {"job_id": "'old-' || n"},
    "rank_logs": {"job_id": "'old-' || n", "log_id": "-n"},
    "checkpoints": {"job_id": "'old-' || n"},
    "decisions": {"job_id": "'old-' || n", "decision_id": "-n"},
    "audit": {"audit_id": "-n", "target": "'old-' || n"},
    "nodes": {"node_id": "'old-' || n", "state": "'gone'"},
    "capacity_requests": {"request_id": "-n"},
    "instances": {"instance_id": "-n", "request_id": "-n", "node_id": "'old-' || n", "released_at": "known_since"},
    "leases": {"lease_id": "-n", "instance_id": "-n", "node_id": "'old-' || n",
               "started_at": "started_at - interval '3 days'", "ended_at": "started_at - interval '3 days'"},
    "notices": {"notice_id": "-n", "lease_id": "-n", "node_id": "'old-' || n", "occurrence_id": "-n",
                "recorded_at": "recorded_at - interval '3 days'"},
    "agent_incarnations": {"incarnation": "gen_random_uuid()", "node_id": "'old-' || n"},
    "ledger": {"interval_id": "-n", "lease_id": "-n", "job_id": "'old-' || n", "rolled": "true", "follows": "null"},
    "tokens": {"token_id": "'old' || n", "revoked_at": "created_at", "created_at": "created_at - n * interval '1 s'"},
}  # fmt: skip


class Reads:
    """How many rows of tables a piece of work reads, in all of its transactions."""

    def __init__(self, *engines: Engine) -> None:
        self._engines, self.rows = engines, 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.rows = 0
        hooks = {"begin": self._begin, "commit": self._end, "rollback": self._end}
        for engine in self._engines:
            for name, hook in hooks.items():
                event.listen(engine, name, hook)
        yield
        for engine in self._engines:
            for name, hook in hooks.items():
                event.remove(engine, name, hook)

    def _begin(self, connection) -> None:
        # The server adds up what a connection has read, and empties that now and then between transactions.
        connection.info["read_before"] = _read(connection)

    def _end(self, connection) -> None:
        self.rows += _read(connection) - connection.info["read_before"]


def _read(connection) -> int:
    with connection.connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)::bigint FROM pg_stat_xact_user_tables"
        )
        return cursor.fetchone()[0]


@contextmanager
def without_keys(database: Database) -> Iterator[Session]:
    """Constraints that refer to other rows are not looked at: what is made here has none."""
    with database.sessions.begin() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        yield session
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM (ANALYZE)"))


def add_history(context) -> None:
    with without_keys(context.database) as session:
        for table, changes in _COPIES.items():
            values = ", ".join(f"'{column}', {value}" for column, value in changes.items())
            session.execute(
                text(
                    f"INSERT INTO {table} OVERRIDING SYSTEM VALUE SELECT made.* "
                    f"FROM (SELECT * FROM {table} LIMIT 1) AS one CROSS JOIN generate_series(1, {PAST}) AS n "
                    f"CROSS JOIN LATERAL jsonb_populate_record("
                    f"CAST(NULL AS {table}), to_jsonb(one) || jsonb_build_object({values})) AS made"
                )
            )


@pytest.fixture
def work(fleet: Fleet, settings) -> dict[str, Callable[[], object]]:
    """What the service does over and over, by name."""
    fleet.stopped()
    fleet.run()
    client, context, job_id = fleet.client, fleet.context, fleet.job_id
    # Between two transactions the server may empty what it has added up: here a read is one transaction.
    for lane in (context.agents, context.people):
        lane.reading = lane.sessions
    client.post("/api/v1/nodes/a/drain", json={"in_s": 3_600})
    fleet.round()
    client.post("/api/v1/nodes/a/undrain")
    for _ in range(3):
        fleet.round()
    with context.sessions.begin() as session:
        session.execute(text("INSERT INTO metrics SELECT job_id, 1, 1, '{}', now() FROM jobs LIMIT 1"))
        session.execute(
            text(
                "INSERT INTO rank_logs (job_id, generation, rank, start_offset, text, recorded_at) "
                "SELECT job_id, 1, 0, 0, 'x', created_at FROM jobs LIMIT 1"
            )
        )
        session.execute(text("UPDATE jobs SET emptied_at = state_changed_at + interval '1 s' WHERE due_at IS NULL"))

    def reconcile() -> None:
        with context.sessions.begin() as session:
            session.execute(text("UPDATE jobs SET due_at = created_at WHERE job_id = :job_id"), {"job_id": job_id})
        assert jobs.tick(context) == 1

    def notices() -> None:
        with context.sessions() as session:
            open_notices(session, now=fleet.clock())

    def page(path: str) -> Callable[[], None]:
        def get() -> None:
            answer = client.get(path, headers=bearer(settings, "admin"))
            assert answer.status_code == 200, (path, answer.text)

        return get

    lists = ("audit", "fleet", "handoffs", "handoffs?state=broken", "instances", "jobs", "jobs?state=running", "leases",
             "nodes?state=ready", "notices", "ledger", f"ledger?job_id={job_id}", "ledger?since=2026-01-01T11:30:00Z",
             "pools/prices", "tokens", f"audit?target={job_id}", f"handoffs?job_id={job_id}", "nodes/a",
             "notices?node_id=a", "leases?node_id=a", "instances?node_id=a")  # fmt: skip
    of_job = ("", "checkpoints", "decisions", "generations", "logs", "metrics", "plan", "steps")
    return {
        "a report": lambda: fleet.agents["b"].sync(),
        "the job reconciler": reconcile,
        "the node reconciler": fleet.watch.tick,
        "upkeep": lambda: upkeep.tick(context),
        "open notices": notices,
        **{path: page(f"/api/v1/{path}") for path in lists},
        **{f"jobs/JOB/{path}": page(f"/api/v1/jobs/{job_id}/{path}".rstrip("/")) for path in of_job},
    }


@pytest.mark.thorough
def test_pages_of_nodes_read_the_members_of_their_own_nodes_only(fleet: Fleet, work):
    """Jobs that have ended have no members: these are of other jobs that go on."""
    database = fleet.context.database
    reads, found = Reads(database.engine, database.readers_engine), {}
    members = "INSERT INTO job_members SELECT 'other', 'other-' || n, 'member' FROM generate_series(1, :n) AS n"
    for others in (0, PAST):
        with without_keys(database) as session:
            session.execute(text(members), {"n": others})
        for name in ("nodes/a", "nodes?state=ready"):
            with reads.counted():
                work[name]()
            found.setdefault(name, []).append(reads.rows)
    assert all(rows[1] <= rows[0] + A_PAGE for rows in found.values()), found


@pytest.mark.thorough
def test_nothing_reads_more_because_of_history(fleet: Fleet, work):
    database = fleet.context.database
    reads = Reads(database.engine, database.readers_engine)
    found: dict[str, list[int]] = {name: [] for name in work}
    for is_long in (False, True):
        if is_long:
            add_history(fleet.context)
        for name, do in work.items():
            with reads.counted():
                do()
            found[name].append(reads.rows)
    grown = {name: rows for name, rows in found.items() if rows[1] > rows[0] + A_PAGE}
    assert grown == {}, grown
