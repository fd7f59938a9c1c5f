"""What a handoff is for, in words. Those before it say what became of them."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("handoffs", sa.Column("why", sa.Text(), nullable=False, server_default=""))
    op.alter_column("handoffs", "why", server_default=None)


def downgrade() -> None:
    op.drop_column("handoffs", "why")
