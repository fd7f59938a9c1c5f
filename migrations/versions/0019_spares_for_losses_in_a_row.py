"""The free nodes that a job's agents may take by themselves, for losses that follow each other."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("spares", postgresql.JSONB(), nullable=False, server_default="[]"))
    op.alter_column("jobs", "spares", server_default=None)


def downgrade() -> None:
    op.drop_column("jobs", "spares")
