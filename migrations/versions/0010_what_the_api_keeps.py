"""Pages of handoffs by index, of all and of a job; answers kept for requests that are sent again;
jobs that are paused, the ledger of jobs that are deleted, and what was decided about jobs.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
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
    op.create_table(
        "decisions",
        sa.Column("decision_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_by", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("verdict_reason", sa.Text(), nullable=False),
        sa.Column("layout", sa.Text(), nullable=True),
        sa.Column("nodes", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("alternatives", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("inputs_digest", sa.Text(), nullable=False),
        sa.Column("what_sha256", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_decisions_job_id")),
        sa.PrimaryKeyConstraint("decision_id", name=op.f("pk_decisions")),
    )
    op.create_index("ix_decisions_job", "decisions", ["job_id", "decision_id"])
    # What a job took stays in the ledger when the job is deleted.
    op.drop_constraint(op.f("fk_ledger_job_id"), "ledger", type_="foreignkey")


def downgrade() -> None:
    op.execute("UPDATE ledger SET job_id = NULL WHERE job_id NOT IN (SELECT job_id FROM jobs)")
    op.create_foreign_key(op.f("fk_ledger_job_id"), "ledger", "jobs", ["job_id"], ["job_id"])
    op.drop_column("jobs", "paused_because")
    op.drop_table("decisions")
    op.drop_table("answers")
    op.drop_index("ix_handoffs_job_opened", table_name="handoffs")
    op.drop_index("ix_handoffs_opened", table_name="handoffs")
    op.create_index("ix_handoffs_opened", "handoffs", ["opened_at"])
