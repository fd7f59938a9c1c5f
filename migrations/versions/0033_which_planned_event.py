"""Which planned event a notice is of, and when its cloud said so."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

FACT = ["first_seen_at", "deadline_at", "withdrawn_at"]


def upgrade() -> None:
    op.add_column("notices", sa.Column("event_id", sa.Text(), server_default="", nullable=False))
    op.add_column("notices", sa.Column("said_at", sa.DateTime(timezone=True), nullable=True))
    _name_notices_by(["lease_id", "kind", "source", "event_id"])


def downgrade() -> None:
    # Of several planned events only one can be told from the others.
    op.execute("DELETE FROM notices WHERE event_id <> ''")
    _name_notices_by(["lease_id", "kind", "source"])
    op.drop_column("notices", "said_at")
    op.drop_column("notices", "event_id")


def _name_notices_by(columns: list[str]) -> None:
    op.drop_index("ix_notices_newest", table_name="notices")
    op.drop_constraint("uq_notices_fact", "notices", type_="unique")
    op.create_unique_constraint("uq_notices_fact", "notices", [*columns, *FACT], postgresql_nulls_not_distinct=True)
    op.create_index("ix_notices_newest", "notices", [*columns, "notice_id"])
