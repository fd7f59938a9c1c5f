"""Auto Scaling groups that wait with the end of a machine until jobs have left it."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "termination_hooks",
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=False),
        sa.Column("hook_name", sa.Text(), nullable=False),
        sa.Column("provider_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("lease_id", sa.BigInteger(), nullable=True),
        sa.Column("heard_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeats", sa.BigInteger(), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("claim_token", sa.Uuid(), nullable=True),
        sa.Column("claim_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_termination_hooks_node_id")),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.lease_id"], name=op.f("fk_termination_hooks_lease_id")),
        sa.PrimaryKeyConstraint("token", name=op.f("pk_termination_hooks")),
    )
    op.create_index(
        "ix_termination_hooks_due", "termination_hooks", ["due_at"], postgresql_where=sa.text("due_at IS NOT NULL")
    )


def downgrade() -> None:
    op.drop_table("termination_hooks")
