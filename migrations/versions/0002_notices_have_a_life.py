"""Notices can be withdrawn and heard anew, and a node says how its notice source is doing."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("notice_source", postgresql.JSONB(none_as_null=True), nullable=True))
    op.add_column("notices", sa.Column("withdrawn_at", sa.DateTime(timezone=True), nullable=True))
    op.drop_constraint("uq_notices_lease_id_kind_deadline_at", "notices", type_="unique")
    op.create_unique_constraint(
        "uq_notices_fact",
        "notices",
        ["lease_id", "kind", "source", "first_seen_at", "deadline_at", "withdrawn_at"],
        postgresql_nulls_not_distinct=True,
    )
    op.create_index("ix_notices_newest", "notices", ["lease_id", "kind", "source", "notice_id"], unique=False)


def downgrade() -> None:
    """What only this schema can tell apart becomes one row again: the oldest of each kind and deadline stays."""
    op.drop_index("ix_notices_newest", table_name="notices")
    op.drop_constraint("uq_notices_fact", "notices", type_="unique")
    op.execute(
        "DELETE FROM notices USING notices AS older WHERE older.lease_id = notices.lease_id"
        " AND older.kind = notices.kind AND older.deadline_at IS NOT DISTINCT FROM notices.deadline_at"
        " AND older.notice_id < notices.notice_id"
    )
    op.create_unique_constraint(
        "uq_notices_lease_id_kind_deadline_at",
        "notices",
        ["lease_id", "kind", "deadline_at"],
        postgresql_nulls_not_distinct=True,
    )
    op.drop_column("notices", "withdrawn_at")
    op.drop_column("nodes", "notice_source")
