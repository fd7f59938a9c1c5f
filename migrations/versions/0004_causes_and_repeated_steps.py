"""What ended a world or an attempt, when ranks first failed, and up to which step a generation repeats earlier ones."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

ENDED = ("job_generations", "handoffs")


def upgrade() -> None:
    op.add_column("job_generations", sa.Column("repeats_until", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("error_at", sa.TIMESTAMP(timezone=True), nullable=True))
    for table in ENDED:
        cause = postgresql.JSONB(none_as_null=True, astext_type=sa.Text())
        op.add_column(table, sa.Column("ended_by", cause, nullable=True))


def downgrade() -> None:
    for table in ENDED:
        op.drop_column(table, "ended_by")
    op.drop_column("jobs", "error_at")
    op.drop_column("job_generations", "repeats_until")
