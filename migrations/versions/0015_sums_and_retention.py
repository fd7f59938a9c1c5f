"""Sums of intervals that have ended, by job and hour; what tells how much there is to delete."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

CAUSES = "cause IN ('productive', 'bootstrap', 'pause', 'recompute', 'idle', 'lost', 'fallback_restart')"


def upgrade() -> None:
    op.add_column("ledger", sa.Column("rolled", sa.Boolean(), nullable=False, server_default="false"))
    op.alter_column("ledger", "rolled", server_default=None)
    op.drop_index("ix_ledger_job", "ledger")
    op.create_index("ix_ledger_unrolled", "ledger", ["job_id"], postgresql_where=sa.text("NOT rolled"))
    op.create_index("ix_ledger_rolled", "ledger", ["ends_at"], postgresql_where=sa.text("rolled"))
    op.create_table(
        "ledger_sums",
        sa.Column("sum_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("price_from", sa.DateTime(timezone=True), nullable=False),
        sa.Column("micros", sa.BigInteger(), nullable=False),
        sa.Column("merged", sa.Boolean(), nullable=False),
        sa.CheckConstraint(CAUSES, name=op.f("ck_ledger_sums_cause_known")),
        sa.PrimaryKeyConstraint("sum_id", name=op.f("pk_ledger_sums")),
    )
    op.create_index("ix_ledger_sums_job", "ledger_sums", ["job_id", "hour"])
    op.create_index("ix_ledger_sums_pool", "ledger_sums", ["pool", "hour"])
    op.create_index("ix_ledger_sums_loose", "ledger_sums", ["sum_id"], postgresql_where=sa.text("NOT merged"))
    kept = op.create_table(
        "ledger_kept",
        sa.Column("place", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kept_from", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("place = 1", name=op.f("ck_ledger_kept_one_row")),
        sa.PrimaryKeyConstraint("place", name=op.f("pk_ledger_kept")),
    )
    op.bulk_insert(kept, [{"place": 1, "kept_from": None}])
    _make_retention()


def _make_retention() -> None:
    op.create_table(
        "log_sizes",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("chars", sa.BigInteger(), nullable=False),
        sa.Column("counted_to", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_log_sizes_job_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_log_sizes")),
    )
    op.add_column("jobs", sa.Column("emptied_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index(
        "ix_jobs_full",
        "jobs",
        ["state_changed_at"],
        postgresql_where=sa.text("due_at IS NULL AND (emptied_at IS NULL OR emptied_at < state_changed_at)"),
    )
    op.create_index(
        "ix_tokens_working", "tokens", ["created_at", "token_id"], postgresql_where=sa.text("revoked_at IS NULL")
    )
    op.create_index("ix_instances_node", "instances", ["node_id", "instance_id"])
    op.create_index(
        "ix_handoffs_failed", "handoffs", ["changed_at"], postgresql_where=sa.text("state IN ('aborted', 'broken')")
    )


def downgrade() -> None:
    op.drop_index("ix_tokens_working", "tokens")
    op.drop_index("ix_instances_node", "instances")
    op.drop_index("ix_handoffs_failed", "handoffs")
    op.drop_index("ix_jobs_full", "jobs")
    op.drop_column("jobs", "emptied_at")
    op.drop_table("log_sizes")
    op.drop_table("ledger_kept")
    op.drop_table("ledger_sums")
    op.drop_index("ix_ledger_rolled", "ledger")
    op.drop_index("ix_ledger_unrolled", "ledger")
    op.create_index("ix_ledger_job", "ledger", ["job_id", "starts_at"])
    op.drop_column("ledger", "rolled")
