"""Pages of handoffs by index, of all and of a job; answers kept for requests that are sent again;
jobs that are paused, and the ledger of jobs that are deleted.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_handoffs_opened", table_name="handoffs")
    op.create_index("ix_handoffs_opened", "handoffs", ["opened_at", "handoff_id"])
    op.create_index("ix_handoffs_job_opened", "handoffs", ["job_id", "opened_at", "handoff_id"])
    op.create_table(
        "answers",
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("key_sha256", sa.Text(), nullable=False),
        sa.Column("request_sha256", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("answered_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key_sha256", name=op.f("pk_answers")),
    )
    op.create_index(op.f("ix_answers_answered_at"), "answers", ["answered_at"])
    op.add_column("jobs", sa.Column("paused_because", sa.Text(), nullable=False, server_default=""))
    # What a job took stays in the ledger when the job is deleted.
    op.drop_constraint(op.f("fk_ledger_job_id"), "ledger", type_="foreignkey")


def downgrade() -> None:
    op.execute("UPDATE ledger SET job_id = NULL WHERE job_id NOT IN (SELECT job_id FROM jobs)")
    op.create_foreign_key(op.f("fk_ledger_job_id"), "ledger", "jobs", ["job_id"], ["job_id"])
    op.drop_column("jobs", "paused_because")
    op.drop_table("answers")
    op.drop_index("ix_handoffs_job_opened", table_name="handoffs")
    op.drop_index("ix_handoffs_opened", table_name="handoffs")
    op.create_index("ix_handoffs_opened", "handoffs", ["opened_at"])
