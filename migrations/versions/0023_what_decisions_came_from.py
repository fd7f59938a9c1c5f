"""What a decision came from, the numbers of nodes that were weighed for it, and what a person should know."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

COLUMNS = (("inputs", "{}"), ("options", "[]"), ("alerts", "[]"))


def upgrade() -> None:
    for name, empty in COLUMNS:
        op.add_column("decisions", sa.Column(name, postgresql.JSONB(), nullable=False, server_default=empty))
        op.alter_column("decisions", name, server_default=None)


def downgrade() -> None:
    for name, _ in COLUMNS:
        op.drop_column("decisions", name)
