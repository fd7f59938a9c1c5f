"""From when on the ranks of a generation may step, where an older world may step on until then."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job_generations", sa.Column("steps_from_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("job_generations", "steps_from_at")
