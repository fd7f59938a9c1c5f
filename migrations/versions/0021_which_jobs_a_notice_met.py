"""Which jobs a node worked for when a notice about it came, and the leases that ended lately."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("notices", sa.Column("job_ids", postgresql.JSONB(), nullable=False, server_default="[]"))
    op.alter_column("notices", "job_ids", server_default=None)
    op.create_index(
        "ix_notices_first_of_job",
        "notices",
        ["job_ids"],
        postgresql_using="gin",
        postgresql_ops={"job_ids": "jsonb_path_ops"},
        postgresql_where=sa.text("notice_id = occurrence_id"),
    )
    op.create_index("ix_leases_ended", "leases", ["ended_at"], postgresql_where=sa.text("ended_at IS NOT NULL"))


def downgrade() -> None:
    op.drop_index("ix_leases_ended", "leases")
    op.drop_index("ix_notices_first_of_job", "notices")
    op.drop_column("notices", "job_ids")
