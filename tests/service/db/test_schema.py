"""The schema: what the shipped migrations make, and what the database itself refuses."""

from datetime import UTC, datetime, timedelta

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError

from service.capacity.tables import InstanceRow
from service.db.engine import StartError
from service.db.schema import metadata
from service.db.upgrade import upgrade
from service.jobs.tables import JobRow
from service.leases.operations import begin_lease
from service.leases.tables import LeaseRow
from service.ledger.operations import account_all, charge_pause, close_lease
from service.ledger.rules import Spent
from service.ledger.tables import Cause, IntervalRow
from service.nodes.tables import NodeRow

START = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_migrations_make_exactly_the_tables_of_the_code(database):
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata()) == []


def test_a_schema_that_a_newer_program_made_is_named_and_left_alone(database):
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StartError, match=r"schema revision 9999, and this program knows those up to \d{4}: a newer"):
        upgrade(database.engine)
    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"


def test_a_database_user_without_rights_is_named_with_what_it_needs(database):
    with database.engine.begin() as connection:
        connection.execute(text("CREATE ROLE guest LOGIN"))
    guest = create_engine(database.engine.url.set(username="guest"))
    try:
        with pytest.raises(StartError, match=r"user guest lacks rights: permission denied for .*; it needs to own the"):
            upgrade(guest)
    finally:
        guest.dispose()
        with database.engine.begin() as connection:
            connection.execute(text("DROP ROLE guest"))


@pytest.mark.thorough
def test_the_migrations_can_be_taken_back_and_applied_again(database):
    upgrade(database.engine, revision="base")
    assert set(inspect(database.engine).get_table_names()) == {"alembic_version"}
    upgrade(database.engine)
    assert "job_generations" in inspect(database.engine).get_table_names()


def test_a_job_whose_next_generation_was_made_up_goes_on_from_the_highest_that_was_used(database):
    upgrade(database.engine, revision="base")
    upgrade(database.engine, revision="0029")
    with database.engine.begin() as connection:
        connection.execute(text(_JOB))
        connection.execute(text(_GENERATION))
        connection.execute(text("UPDATE jobs SET next_generation = 9007199254740992"))
    upgrade(database.engine)
    with database.sessions() as session:
        assert session.get_one(JobRow, "j").next_generation == 2


def test_a_job_whose_active_world_has_a_made_up_number_starts_again_from_the_world_before(database):
    upgrade(database.engine, revision="base")
    upgrade(database.engine, revision="0029")
    with database.engine.begin() as connection:
        connection.execute(text(_JOB))
        connection.execute(text(_GENERATION))
        connection.execute(text(_GENERATION.replace("'j', 1", "'j', 9007199254740991")))
        highest = "state = 'running', next_generation = 9007199254740992, active_generation = 9007199254740991"
        connection.execute(text(f"UPDATE jobs SET {highest}"))
    upgrade(database.engine)
    with database.sessions() as session:
        job = session.get_one(JobRow, "j")
        assert (job.active_generation, job.next_generation, job.state) == (1, 2, "suspended")
        assert job.reason == job.suspended_because == "the number of its world was made up"


def test_upgrading_a_database_that_is_up_to_date_changes_nothing(database):
    upgrade(database.engine)
    upgrade(database.engine)


@pytest.mark.parametrize(
    ("statement", "constraint"),
    [
        ("UPDATE jobs SET state = 'odd'", "ck_jobs_state_known"),
        ("UPDATE jobs SET active_generation = 7", "ck_jobs_active_generation_was_burned"),
        ("UPDATE jobs SET next_generation = 9007199254740992", "ck_jobs_next_generation_bounded"),
        ("UPDATE jobs SET next_generation = 9, active_generation = 7", "fk_jobs_active_generation"),
    ],
)
def test_the_database_refuses_a_job_that_cannot_be(database, statement, constraint):
    with pytest.raises(IntegrityError, match=constraint), database.engine.begin() as connection:
        connection.execute(text(_JOB))
        connection.execute(text(statement))


def test_a_generation_number_of_a_job_exists_once(database):
    with pytest.raises(IntegrityError, match="pk_job_generations"), database.engine.begin() as connection:
        connection.execute(text(_JOB))
        connection.execute(text(_GENERATION))
        connection.execute(text(_GENERATION))


def test_two_handoffs_of_a_job_cannot_have_one_generation(database):
    row = (
        "INSERT INTO handoffs (handoff_id, job_id, parent, generation, plan_revision, plan_digest, mirror_seq,"
        " proposer, cause, state, stage, rung, target, source_layout, target_layout, leaving, superseded, why, reason,"
        " opened_at, changed_at, recorded_at, measures, pause_charged_s) VALUES (gen_random_uuid(), 'j', 1, 2, 1, '',"
        " 0, 'a', 'notice', 'preparing', '', 'live', '{}', '', '', '[]', false, '', '', now(), now(), now(), '{}', 0)"
    )
    with pytest.raises(IntegrityError, match="uq_handoffs_job_id_generation"), database.engine.begin() as connection:
        connection.execute(text(_JOB))
        connection.execute(text(row))
        connection.execute(text(row))


def test_leases_and_prices_of_an_earlier_release_are_taken_over(database):
    """Each node becomes one machine; two leases that overlapped by a moment no longer do."""
    upgrade(database.engine, revision="base")
    upgrade(database.engine, revision="0011")
    with database.engine.begin() as connection:
        connection.execute(text(_NODE))
        for starts_s, ends_s in ((0, 9.002), (9.001, 10), (12, None)):
            ends = None if ends_s is None else START + timedelta(seconds=ends_s)
            connection.execute(text(_LEASE), {"starts": START + timedelta(seconds=starts_s), "ends": ends})
        connection.execute(text("INSERT INTO pool_prices VALUES ('p', now(), 0.1)"))
        connection.execute(text(_JOB_AT_FIRST))
        connection.execute(text(_CHARGED))
    upgrade(database.engine)
    with database.sessions() as session:
        leases = session.query(LeaseRow).order_by(LeaseRow.lease_id).all()
        assert {lease.instance_id for lease in leases} == {row.instance_id for row in session.query(InstanceRow)}
        assert len({lease.instance_id for lease in leases}) == 1
        assert leases[0].ended_at == leases[1].started_at
        assert session.scalars(text("SELECT pause_charged_s FROM handoffs")).all() == [0.25]
        assert session.scalars(text("SELECT CAST(price_usd_per_hour AS text) FROM pool_prices")).all() == ["0.1"]
        since = session.execute(text("SELECT peer_key_number, peer_key_at = created_at FROM jobs")).one()
        assert tuple(since) == (1, True), "whoever has left the job since it began may know its key"


class TestTheLedgerChain:
    def test_an_interval_must_start_where_one_ends(self, session, lease):
        account_all(session, lease=lease, until=START + timedelta(seconds=5), spent=[Spent(Cause.IDLE)])
        session.add(_interval(lease, starts_s=6, ends_s=7, follows_s=6))
        with pytest.raises(IntegrityError, match="fk_ledger_follows"):
            session.commit()

    def test_only_the_first_interval_of_a_slot_follows_nothing(self, session, lease):
        account_all(session, lease=lease, until=START + timedelta(seconds=5), spent=[Spent(Cause.IDLE)])
        session.add(_interval(lease, starts_s=5, ends_s=7, follows_s=None))
        with pytest.raises(IntegrityError, match="uq_ledger_first"):
            session.flush()

    def test_two_intervals_cannot_follow_the_same_one(self, session, lease):
        account_all(session, lease=lease, until=START + timedelta(seconds=5), spent=[Spent(Cause.IDLE)])
        session.add(_interval(lease, starts_s=5, ends_s=7, follows_s=5))
        session.flush()
        session.add(_interval(lease, starts_s=5, ends_s=8, follows_s=5))
        with pytest.raises(IntegrityError, match="uq_ledger_lease_id_slot_follows"):
            session.flush()

    def test_an_interval_is_never_empty(self, session, lease):
        session.add(_interval(lease, starts_s=0, ends_s=0, follows_s=None))
        with pytest.raises(IntegrityError, match="ck_ledger_not_empty"):
            session.flush()

    def test_the_same_cause_grows_the_last_interval_and_another_appends_one(self, session, lease):
        for seconds, cause in ((1, Cause.IDLE), (2, Cause.IDLE), (3, Cause.BOOTSTRAP), (2, Cause.LOST)):
            account_all(session, lease=lease, until=START + timedelta(seconds=seconds), spent=[Spent(cause)])
        rows = session.query(IntervalRow).order_by(IntervalRow.starts_at).all()
        assert [(row.cause, (row.ends_at - START).total_seconds()) for row in rows] == [("idle", 2), ("bootstrap", 3)]

    def test_all_slots_at_once_are_what_each_slot_alone_would_be(self, session, lease):
        job = {"job_id": "j", "generation": 1}
        session.execute(text(_JOB))
        rounds = (
            (1, Spent(Cause.IDLE), Spent(Cause.PRODUCTIVE, **job)),
            (2, Spent(Cause.IDLE), Spent(Cause.PRODUCTIVE, **job)),
            (3, Spent(Cause.LOST), Spent(Cause.PRODUCTIVE, "j", 2)),
            (2, Spent(Cause.LOST), Spent(Cause.PRODUCTIVE, "j", 2)),
            (4, Spent(Cause.LOST), Spent(Cause.PRODUCTIVE)),
        )
        for seconds, *spent in rounds:
            account_all(session, lease=lease, until=START + timedelta(seconds=seconds), spent=spent)
        session.commit()
        rows = session.query(IntervalRow).order_by(IntervalRow.slot, IntervalRow.starts_at).all()
        assert [(row.slot, row.cause, row.generation, (row.ends_at - START).total_seconds()) for row in rows] == [
            (0, "idle", None, 2), (0, "lost", None, 4),
            (1, "productive", 1, 2), (1, "productive", 2, 3), (1, "productive", None, 4),
        ]  # fmt: skip

    def test_a_pause_is_cut_from_the_end_of_a_jobs_time_and_the_chain_still_tiles_all_of_it(self, session, lease):
        session.execute(text(_JOB))
        rounds = (
            (5, Spent(Cause.IDLE)), (10, Spent(Cause.BOOTSTRAP, "j")), (10.2, Spent(Cause.PRODUCTIVE, "j", 1)),
            (10.3, Spent(Cause.RECOMPUTE, "j", 1)),
        )  # fmt: skip
        for seconds, spent in rounds:
            account_all(session, lease=lease, until=START + timedelta(seconds=seconds), spent=[spent])
        assert charge_pause(session, lease=lease, slot=0, seconds=0.25, job_id="j") == 0.25
        session.commit()
        assert self.intervals(session) == [
            ("idle", 5), ("bootstrap", 5), ("productive", 0.05), ("pause", 0.15), ("pause", 0.1)
        ]  # fmt: skip
        assert charge_pause(session, lease=lease, slot=0, seconds=0.1, job_id="j") == 0.1
        account_all(session, lease=lease, until=START + timedelta(seconds=11), spent=[Spent(Cause.PRODUCTIVE, "j", 1)])
        session.commit()
        assert self.intervals(session) == [
            ("idle", 5), ("bootstrap", 4.95), ("pause", 0.05), ("pause", 0.05), ("pause", 0.15), ("pause", 0.1),
            ("productive", 0.7),
        ]  # fmt: skip

    def test_no_more_pause_is_found_than_the_slot_worked_for_the_job(self, session, lease):
        session.execute(text(_JOB))
        for seconds, spent in ((5, Spent(Cause.IDLE)), (6, Spent(Cause.PRODUCTIVE, "j", 1))):
            account_all(session, lease=lease, until=START + timedelta(seconds=seconds), spent=[spent])
        assert charge_pause(session, lease=lease, slot=0, seconds=2, job_id="other") == 0
        assert charge_pause(session, lease=lease, slot=0, seconds=2, job_id="j") == 1
        session.commit()
        assert self.intervals(session) == [("idle", 5), ("pause", 1)]

    @staticmethod
    def intervals(session) -> list[tuple[str, float]]:
        rows = session.query(IntervalRow).order_by(IntervalRow.starts_at).all()
        assert [row.follows for row in rows] == [None, *(row.ends_at for row in rows[:-1])]
        return [(row.cause, (row.ends_at - row.starts_at).total_seconds()) for row in rows]


class TestLeases:
    def test_two_leases_of_a_machine_never_overlap(self, session, lease):
        lease.ended_at = START + timedelta(seconds=5)
        account_all(session, lease=lease, until=lease.ended_at, spent=[Spent(Cause.IDLE)] * 2)
        session.commit()
        session.add(_lease_of(lease, starts_s=4))
        with pytest.raises(IntegrityError, match="ex_leases_overlap"):
            session.flush()

    def test_a_machine_may_have_a_lease_right_after_another(self, session, lease):
        close_lease(session, lease=lease, at=START + timedelta(seconds=5), spent=[Spent(Cause.IDLE)] * 2, reason="")
        session.add(_lease_of(lease, starts_s=5))
        session.commit()

    @pytest.mark.parametrize(("accounted_s", "slots"), [(0, 2), (4, 2), (5, 1)])
    def test_a_lease_does_not_end_with_time_that_has_no_cause(self, session, lease, accounted_s, slots):
        until = START + timedelta(seconds=accounted_s)
        account_all(session, lease=lease, until=until, spent=[Spent(Cause.IDLE)] * slots)
        lease.ended_at = START + timedelta(seconds=5)
        with pytest.raises(IntegrityError, match="leases_are_covered"):
            session.commit()

    def test_an_account_begins_with_its_lease_and_only_for_its_slots(self, session, lease):
        for slot, starts_s in ((0, 1), (2, 0)):
            row = _interval(lease, starts_s=starts_s, ends_s=5, follows_s=None)
            row.slot = slot
            session.add(row)
            with pytest.raises(IntegrityError, match="ledger_begins_with_lease"):
                session.commit()
            session.rollback()

    def test_a_machine_has_one_name_at_its_provider(self, session, lease):
        request_id = session.get_one(InstanceRow, lease.instance_id).request_id
        same = {"request_id": request_id, "provider": "aws", "provider_id": "i-1", "pool": "p", "known_since": START}
        session.add_all([InstanceRow(**same), InstanceRow(**same)])
        with pytest.raises(IntegrityError, match="uq_instances_provider_id"):
            session.flush()


def _lease_of(lease: LeaseRow, *, starts_s: float) -> LeaseRow:
    return LeaseRow(
        node_id=lease.node_id,
        instance_id=lease.instance_id,
        pool="p",
        slots=1,
        started_at=START + timedelta(seconds=starts_s),
    )


@pytest.fixture
def session(database):
    with database.sessions() as session:
        yield session


@pytest.fixture
def lease(session):
    session.add(
        NodeRow(
            node_id="a", provider="none", pool="p", slots=1, peer_url="http://a", private_address="a", device="cpu",
            agent_version="1", agent_incarnation="00000000-0000-0000-0000-000000000001", report_seq=0, state="ready",
            first_seen_at=START, last_seen_at=START,
        )
    )  # fmt: skip
    session.flush()
    lease = begin_lease(session, node_id="a", provider="none", pool="p", slots=2, now=START)
    session.commit()
    return lease


def _interval(lease: LeaseRow, *, starts_s: float, ends_s: float, follows_s: float | None) -> IntervalRow:
    return IntervalRow(
        lease_id=lease.lease_id,
        slot=0,
        follows=None if follows_s is None else START + timedelta(seconds=follows_s),
        starts_at=START + timedelta(seconds=starts_s),
        ends_at=START + timedelta(seconds=ends_s),
        cause=Cause.IDLE,
    )


_JOB_AT_FIRST = (
    "INSERT INTO jobs (job_id, name, spec, peer_key, state, reason, next_generation, failed_starts, last_step,"
    " highest_step, lost_steps, standing_plans, layouts_by_count, plan_digest, orders_seq, created_at,"
    " state_changed_at) VALUES ('j', 'j', '{}', '', 'pending', '', 1, 0, 0, 0, 0, '[]', '[]', '', 0, now(), now())"
)
_JOB = (
    _JOB_AT_FIRST.replace("peer_key,", "peer_key, peer_key_number, peer_key_at,")
    .replace("'', 'p", "'', 1, now(), 'p")
    .replace("plan_digest,", "spares, plan_digest,")
    .replace("'[]', '[]', ''", "'[]', '[]', '[]', ''")
)
_GENERATION = (
    "INSERT INTO job_generations (job_id, generation, origin_id, source_kind, layout, nodes, roster, reason,"
    " lost_steps, created_at) VALUES ('j', 1, gen_random_uuid(), 'init', 'TP1', 1, '{}', '', 0, now())"
)
_NODE = (
    "INSERT INTO nodes (node_id, provider, pool, slots, peer_url, private_address, device, agent_version,"
    " agent_incarnation, report_seq, state, first_seen_at, last_seen_at, ranks) VALUES ('a', 'aws', 'p', 1, '', '', '',"
    " '1', gen_random_uuid(), 0, 'ready', '2026-01-01 10:00Z', '2026-01-01 11:00Z', '[]')"
)
_LEASE = (
    "INSERT INTO leases (node_id, pool, slots, started_at, ended_at, end_reason) VALUES ('a', 'p', 1,"
    " CAST(:starts AS timestamptz), CAST(:ends AS timestamptz), '')"
)
_CHARGED = (
    "INSERT INTO handoffs (handoff_id, job_id, parent, generation, plan_revision, plan_digest, mirror_seq, proposer,"
    " cause, state, stage, rung, target, source_layout, target_layout, leaving, superseded, reason, opened_at,"
    " changed_at, recorded_at, measures, pause_charged) VALUES (gen_random_uuid(), 'j', 1, 2, 1, '', 0, 'a', 'notice',"
    " 'active', '', 'live', '{}', '', '', '[]', false, '', now(), now(), now(), '{\"pause_s\": 0.25}', true)"
)
