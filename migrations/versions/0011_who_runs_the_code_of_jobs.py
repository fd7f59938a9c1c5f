"""The user that runs the code of jobs on a node."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("job_user", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("nodes", "job_user")
