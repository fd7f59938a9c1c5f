"""Which notices only peers of a node have told, and through which job."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("notices", sa.Column("told_in", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("notices", "told_in")
