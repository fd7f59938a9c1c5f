"""Checkpoints on request (how many were asked for, and the newest answered), and what a job died of."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COUNTS = ("checkpoints_asked", "checkpoints_answered")


def upgrade() -> None:
    for name in COUNTS:
        op.add_column("jobs", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    errors = postgresql.JSONB(none_as_null=True, astext_type=sa.Text())
    op.add_column("jobs", sa.Column("crashes", errors, nullable=False, server_default="{}"))


def downgrade() -> None:
    for name in ("crashes", *COUNTS):
        op.drop_column("jobs", name)
