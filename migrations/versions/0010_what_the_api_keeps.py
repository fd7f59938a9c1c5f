"""Pages of handoffs by index, of all and of a job."""

from alembic import op

revision = "0010"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_handoffs_opened", table_name="handoffs")
    op.create_index("ix_handoffs_opened", "handoffs", ["opened_at", "handoff_id"])
    op.create_index("ix_handoffs_job_opened", "handoffs", ["job_id", "opened_at", "handoff_id"])


def downgrade() -> None:
    op.drop_index("ix_handoffs_job_opened", table_name="handoffs")
    op.drop_index("ix_handoffs_opened", table_name="handoffs")
    op.create_index("ix_handoffs_opened", "handoffs", ["opened_at"])
