"""How far the list of operations of a GCP project was read."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "operation_cursors",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("inserted_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("recent", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("claim_token", sa.Uuid(), nullable=True),
        sa.Column("claim_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_operation_cursors")),
    )


def downgrade() -> None:
    op.drop_table("operation_cursors")
