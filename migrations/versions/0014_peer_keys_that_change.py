"""Peer keys that change, and who keeps which."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("peer_key_before", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("peer_key_number", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("peer_key_at", sa.DateTime(timezone=True), nullable=True))
    op.execute("UPDATE jobs SET peer_key_number = 1, peer_key_at = created_at")
    op.alter_column("jobs", "peer_key_number", nullable=False)
    op.alter_column("jobs", "peer_key_at", nullable=False)
    op.create_index("ix_job_grants_ends", "job_grants", ["job_id", "ends_at"], postgresql_where=sa.text("role IS NULL"))
    op.create_table(
        "peer_key_holders",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_peer_key_holders_job_id_jobs")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_peer_key_holders_node_id_nodes")),
        sa.PrimaryKeyConstraint("job_id", "node_id", name=op.f("pk_peer_key_holders")),
    )


def downgrade() -> None:
    op.drop_table("peer_key_holders")
    op.drop_index("ix_job_grants_ends", "job_grants")
    for column in ("peer_key_at", "peer_key_number", "peer_key_before"):
        op.drop_column("jobs", column)
