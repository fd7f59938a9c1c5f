"""What each node may see and say of a job, and facts that wait for their handoff."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

APPEND_ONLY = ("job_grants", "audit")


def upgrade() -> None:
    op.create_table(
        "job_grants",
        sa.Column("grant_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("role IN ('member', 'target', 'spare')", name=op.f("ck_job_grants_role_known")),
        sa.CheckConstraint("(role IS NULL) = (ends_at IS NOT NULL)", name=op.f("ck_job_grants_ends_without_role")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_job_grants_job_id_jobs")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_job_grants_node_id_nodes")),
        sa.PrimaryKeyConstraint("grant_id", name=op.f("pk_job_grants")),
    )
    op.create_index("ix_job_grants_newest", "job_grants", ["job_id", "node_id", "grant_id"])
    op.create_index("ix_job_grants_node", "job_grants", ["node_id"])
    op.create_table(
        "held_facts",
        sa.Column("held_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("fact", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("held_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_held_facts_job_id_jobs")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_held_facts_node_id_nodes")),
        sa.PrimaryKeyConstraint("held_id", name=op.f("pk_held_facts")),
    )
    op.create_index("ix_held_facts_job", "held_facts", ["job_id", "node_id"])
    op.create_index("ix_held_facts_held", "held_facts", ["held_at"])
    # Whoever has orders now was given them; a node whose ranks still run for a job has had them.
    op.execute(
        "INSERT INTO job_grants (job_id, node_id, role, at) SELECT job_id, node_id, role, now() FROM job_members"
    )
    op.execute(
        """
        INSERT INTO job_grants (job_id, node_id, at, ends_at)
        SELECT DISTINCT jobs.job_id, nodes.node_id, now(), now() + interval '15 minutes'
          FROM nodes CROSS JOIN LATERAL jsonb_array_elements(nodes.ranks) AS rank
          JOIN jobs ON jobs.job_id = rank ->> 'job_id'
         WHERE NOT EXISTS (SELECT FROM job_members AS members
                            WHERE members.job_id = jobs.job_id AND members.node_id = nodes.node_id)
        """
    )
    op.execute(
        """
        CREATE FUNCTION rows_are_only_added() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'rows of % are only ever added', TG_TABLE_NAME; END $$
        """
    )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_rows_are_only_added BEFORE UPDATE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION rows_are_only_added()"
        )


def downgrade() -> None:
    for table in APPEND_ONLY:
        op.execute(f"DROP TRIGGER {table}_rows_are_only_added ON {table}")
    op.execute("DROP FUNCTION rows_are_only_added()")
    op.drop_table("held_facts")
    op.drop_table("job_grants")
