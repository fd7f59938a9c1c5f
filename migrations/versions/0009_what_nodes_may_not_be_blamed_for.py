"""What the service knows of a node's clock, and of a silence that may be its own fault."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TIMES = ("tried_at", "excused_until", "clock_at")


def upgrade() -> None:
    for name in TIMES:
        op.add_column("nodes", sa.Column(name, sa.DateTime(timezone=True), nullable=True))
    op.add_column("nodes", sa.Column("clock_ahead_s", sa.Double(), nullable=True))


def downgrade() -> None:
    for name in ("clock_ahead_s", *TIMES):
        op.drop_column("nodes", name)
