"""How the nodes of a job read each other's state, as their agents measured it."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "wires",
        sa.Column("job_id", sa.Text(), sa.ForeignKey("jobs.job_id"), primary_key=True),
        sa.Column("target", sa.Text(), primary_key=True),
        sa.Column("source", sa.Text(), primary_key=True),
        sa.Column("wire", sa.Text(), nullable=True),
        sa.Column("bytes_per_s", sa.Double(), nullable=False),
        sa.Column("latency_s", sa.Double(), nullable=False),
        sa.Column("refused", JSONB(), nullable=False),
        sa.Column("failed", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("wires")
