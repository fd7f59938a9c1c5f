"""What a job should have, by its policy. Decisions before it say nothing of that."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("decisions", sa.Column("wanted", JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("decisions", "wanted")
