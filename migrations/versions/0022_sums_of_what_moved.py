"""Sums of what handoffs moved over the network, by job and hour."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger_egress", sa.Column("rolled", sa.Boolean(), nullable=False, server_default="false"))
    op.alter_column("ledger_egress", "rolled", server_default=None)
    op.drop_index("ix_ledger_egress_job", "ledger_egress")
    op.create_index("ix_ledger_egress_job", "ledger_egress", ["job_id", "at"])
    op.create_index("ix_ledger_egress_at", "ledger_egress", ["at"])
    op.create_index("ix_ledger_egress_unrolled", "ledger_egress", ["at"], postgresql_where=sa.text("NOT rolled"))
    op.create_table(
        "ledger_egress_sums",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("price_from", sa.DateTime(timezone=True), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "hour", "pool", "price_from", name=op.f("pk_ledger_egress_sums")),
    )


def downgrade() -> None:
    op.drop_table("ledger_egress_sums")
    for name in ("unrolled", "at", "job"):
        op.drop_index(f"ix_ledger_egress_{name}", "ledger_egress")
    op.create_index("ix_ledger_egress_job", "ledger_egress", ["job_id"])
    op.drop_column("ledger_egress", "rolled")
