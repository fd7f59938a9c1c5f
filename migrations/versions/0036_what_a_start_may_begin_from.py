"""Which checkpoints are damaged, and which were left behind when a job went back to an earlier one."""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("damage", sa.Text(), nullable=True))
    op.add_column("checkpoints", sa.Column("damaged_in", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("damaged_step", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("from_step", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("from_generation", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    for table, name in (
        ("jobs", "from_generation"),
        ("jobs", "from_step"),
        ("jobs", "damaged_step"),
        ("checkpoints", "damaged_in"),
        ("checkpoints", "damage"),
    ):
        op.drop_column(table, name)
