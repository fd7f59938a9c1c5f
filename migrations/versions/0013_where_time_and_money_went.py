"""Machines and requests for them; leases that leave no time without a cause; exact prices; bytes that left pools."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

PROVIDERS = "provider IN ('aws', 'gcp', 'none')"
LEASE_IS_COVERED = """
CREATE FUNCTION lease_is_covered() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE uncovered bigint;
BEGIN
    SELECT count(*) INTO uncovered
      FROM leases CROSS JOIN LATERAL generate_series(0, leases.slots - 1) AS place (number)
     WHERE leases.lease_id = NEW.lease_id AND leases.ended_at > leases.started_at
       AND leases.ended_at IS DISTINCT FROM (SELECT max(ledger.ends_at) FROM ledger
                                              WHERE ledger.lease_id = leases.lease_id AND ledger.slot = place.number);
    IF uncovered > 0 THEN
        RAISE EXCEPTION '% slots of lease % have no account up to its end', uncovered, NEW.lease_id
              USING ERRCODE = 'check_violation', CONSTRAINT = 'leases_are_covered';
    END IF;
    RETURN NULL;
END $$
"""
BEGINS_WITH_LEASE = """
CREATE FUNCTION ledger_begins_with_lease() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM leases WHERE leases.lease_id = NEW.lease_id AND NEW.slot BETWEEN 0 AND leases.slots - 1
                      AND leases.started_at = NEW.starts_at) THEN
        RAISE EXCEPTION 'the account of slot % of lease % does not begin with the lease', NEW.slot, NEW.lease_id
              USING ERRCODE = 'check_violation', CONSTRAINT = 'ledger_begins_with_lease';
    END IF;
    RETURN NULL;
END $$
"""


def upgrade() -> None:
    _make_capacity()
    op.add_column("leases", sa.Column("instance_id", sa.BigInteger(), nullable=True))
    _fill_capacity()
    op.alter_column("leases", "instance_id", nullable=False)
    op.create_foreign_key(op.f("fk_leases_instance_id"), "leases", "instances", ["instance_id"], ["instance_id"])
    # Replicas went by clocks of their own once: a lease could end a moment after the next one had begun.
    op.execute(
        """
        UPDATE leases SET ended_at = following.started_at FROM leases AS following
         WHERE following.node_id = leases.node_id AND following.lease_id > leases.lease_id
           AND following.started_at > leases.started_at AND following.started_at < leases.ended_at
        """
    )
    # Ranges take part in an exclusion constraint without btree_gist, and an integer is a range of one.
    op.execute(
        "ALTER TABLE leases ADD CONSTRAINT ex_leases_overlap EXCLUDE USING gist "
        "(int8range(instance_id, instance_id, '[]') WITH &&, tstzrange(started_at, ended_at) WITH &&)"
    )
    op.add_column("leases", sa.Column("pauses_due", postgresql.JSONB(), nullable=False, server_default="{}"))
    op.alter_column("leases", "pauses_due", server_default=None)
    _make_prices_exact()
    op.add_column("handoffs", sa.Column("pause_charged_s", sa.Float(), nullable=False, server_default="0"))
    op.alter_column("handoffs", "pause_charged_s", server_default=None)
    op.execute(
        "UPDATE handoffs SET pause_charged_s = coalesce((measures ->> 'pause_s')::float8, 0) WHERE pause_charged"
    )
    op.drop_column("handoffs", "pause_charged")
    op.execute(LEASE_IS_COVERED)
    op.execute(
        "CREATE CONSTRAINT TRIGGER leases_are_covered AFTER INSERT OR UPDATE OF ended_at ON leases "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.ended_at IS NOT NULL) EXECUTE FUNCTION lease_is_covered()"
    )
    op.execute(BEGINS_WITH_LEASE)
    op.execute(
        "CREATE CONSTRAINT TRIGGER ledger_begins_with_lease AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW WHEN (NEW.follows IS NULL) EXECUTE FUNCTION ledger_begins_with_lease()"
    )


def _make_capacity() -> None:
    op.create_table(
        "capacity_requests",
        sa.Column("request_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("machines", sa.BigInteger(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("provider_id", sa.Text(), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.CheckConstraint(PROVIDERS, name=op.f("ck_capacity_requests_provider_known")),
        sa.CheckConstraint("machines >= 1", name=op.f("ck_capacity_requests_machines_positive")),
        sa.CheckConstraint(
            "ended_at IS NULL OR ended_at >= asked_at", name=op.f("ck_capacity_requests_ends_after_it_was_asked")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_capacity_requests")),
    )
    op.create_table(
        "instances",
        sa.Column("instance_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("request_id", sa.BigInteger(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("provider_id", sa.Text(), nullable=True),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("known_since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("paid_from", sa.DateTime(timezone=True), nullable=True),
        sa.Column("paid_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(PROVIDERS, name=op.f("ck_instances_provider_known")),
        sa.CheckConstraint(
            "paid_until IS NULL OR paid_until >= paid_from", name=op.f("ck_instances_paid_until_after_from")
        ),
        sa.CheckConstraint(
            "released_at IS NULL OR released_at >= known_since", name=op.f("ck_instances_released_after_it_was_known")
        ),
        sa.ForeignKeyConstraint(["request_id"], ["capacity_requests.request_id"], name=op.f("fk_instances_request_id")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_instances_node_id")),
        sa.PrimaryKeyConstraint("instance_id", name=op.f("pk_instances")),
    )
    for table in ("capacity_requests", "instances"):
        op.create_index(
            f"uq_{table}_provider_id",
            table,
            ["provider", "provider_id"],
            unique=True,
            postgresql_where=sa.text("provider_id IS NOT NULL"),
        )
    op.create_index(
        "uq_instances_present_node",
        "instances",
        ["node_id"],
        unique=True,
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_index(op.f("ix_instances_request_id"), "instances", ["request_id"])


def _fill_capacity() -> None:
    """One machine for each node that has had a lease: which of them were different machines nobody knows any more."""
    op.execute(
        """
        WITH known AS (
             SELECT nodes.node_id, nodes.provider, nodes.pool, nodes.first_seen_at,
                    nextval(pg_get_serial_sequence('capacity_requests', 'request_id')) AS request_id
               FROM nodes WHERE EXISTS (SELECT FROM leases WHERE leases.node_id = nodes.node_id)),
        asked AS (
             INSERT INTO capacity_requests
                    (request_id, provider, pool, machines, asked_by, asked_at, ended_at, end_reason)
             OVERRIDING SYSTEM VALUE
             SELECT request_id, provider, pool, 1, 'whoever started the agent', first_seen_at, first_seen_at,
                    'the machine has come' FROM known)
        INSERT INTO instances (request_id, provider, node_id, pool, known_since)
        SELECT request_id, provider, node_id, pool, first_seen_at FROM known
        """
    )
    op.execute(
        "UPDATE leases SET instance_id = instances.instance_id FROM instances WHERE instances.node_id = leases.node_id"
    )


def _make_prices_exact() -> None:
    op.alter_column("pool_prices", "price_usd_per_hour", type_=sa.Numeric(), existing_type=sa.Float())
    op.add_column("pool_prices", sa.Column("egress_usd_per_gb", sa.Numeric(), nullable=True))
    op.create_check_constraint(op.f("ck_pool_prices_egress_not_negative"), "pool_prices", "egress_usd_per_gb >= 0")
    op.create_table(
        "ledger_egress",
        sa.Column("handoff_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("bytes >= 0", name=op.f("ck_ledger_egress_bytes_not_negative")),
        sa.PrimaryKeyConstraint("handoff_id", name=op.f("pk_ledger_egress")),
    )
    op.create_index("ix_ledger_egress_job", "ledger_egress", ["job_id"])


def downgrade() -> None:
    op.execute("DROP TRIGGER ledger_begins_with_lease ON ledger")
    op.execute("DROP FUNCTION ledger_begins_with_lease()")
    op.execute("DROP TRIGGER leases_are_covered ON leases")
    op.execute("DROP FUNCTION lease_is_covered()")
    op.add_column("handoffs", sa.Column("pause_charged", sa.Boolean(), nullable=False, server_default="false"))
    op.alter_column("handoffs", "pause_charged", server_default=None)
    op.execute("UPDATE handoffs SET pause_charged = pause_charged_s > 0")
    op.drop_column("handoffs", "pause_charged_s")
    op.drop_table("ledger_egress")
    op.drop_column("pool_prices", "egress_usd_per_gb")
    op.alter_column("pool_prices", "price_usd_per_hour", type_=sa.Float(), existing_type=sa.Numeric())
    op.drop_column("leases", "pauses_due")
    op.drop_constraint("ex_leases_overlap", "leases")
    op.drop_column("leases", "instance_id")
    op.drop_table("instances")
    op.drop_table("capacity_requests")
