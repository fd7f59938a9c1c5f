"""What went wrong with a job without a notice: a loss, a hang, a checkpoint that failed."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_incidents",
        sa.Column("incident_id", sa.BigInteger(), sa.Identity(always=True), primary_key=True),
        sa.Column("job_id", sa.Text(), sa.ForeignKey("jobs.job_id"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("over_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("times", sa.BigInteger(), nullable=False),
        sa.Column("lost_steps", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("kind IN ('checkpoint', 'hang', 'loss')", name="kind_known"),
    )
    op.create_index("ix_job_incidents_of_job", "job_incidents", ["job_id", "incident_id"])
    op.create_index(
        "ix_job_incidents_open",
        "job_incidents",
        ["job_id", "kind"],
        unique=True,
        postgresql_where=sa.text("over_at IS NULL"),
    )
    op.add_column("jobs", sa.Column("warning", sa.Text(), nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("jobs", "warning")
    op.drop_table("job_incidents")
