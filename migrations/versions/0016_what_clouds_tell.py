"""Which machine of its provider a node is; what clouds tell of machines, and which notices are of one loss."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

PROVIDERS = "provider IN ('aws', 'gcp', 'none')"
DISPOSITIONS = (
    "disposition IN ('acts', 'adds', 'advice', 'withdraws', 'noted', 'repeated', 'late', 'foreign', 'malformed')"
)
KNOWN = sa.text("provider_id IS NOT NULL")
PRESENT = sa.text("provider_id IS NOT NULL AND released_at IS NULL")


def upgrade() -> None:
    op.add_column("nodes", sa.Column("provider_id", sa.Text(), nullable=True))
    op.add_column("nodes", sa.Column("zone", sa.Text(), nullable=True))
    op.add_column("instances", sa.Column("zone", sa.Text(), nullable=True))
    op.drop_index("uq_instances_provider_id", "instances")
    op.create_index(
        "uq_instances_provider_id", "instances", ["provider", "provider_id"], unique=True, postgresql_where=PRESENT
    )
    op.add_column("notices", sa.Column("occurrence_id", sa.BigInteger(), nullable=True))
    op.execute(
        """
        UPDATE notices SET occurrence_id = first.notice_id
          FROM (SELECT lease_id, kind, source, first_seen_at, min(notice_id) AS notice_id FROM notices
                 GROUP BY lease_id, kind, source, first_seen_at) AS first
         WHERE (notices.lease_id, notices.kind, notices.source, notices.first_seen_at)
               = (first.lease_id, first.kind, first.source, first.first_seen_at)
        """
    )
    op.create_index("ix_notices_occurrence", "notices", ["occurrence_id"])
    of_occurrence = sa.text("notice_id = occurrence_id")
    op.create_index("ix_notices_first", "notices", ["notice_id"], postgresql_where=of_occurrence)
    op.create_index("ix_notices_first_of_node", "notices", ["node_id", "notice_id"], postgresql_where=of_occurrence)
    op.create_table(
        "notice_hearings",
        sa.Column("hearing_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("message_id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=True),
        sa.Column("provider_id", sa.Text(), nullable=True),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("lease_id", sa.BigInteger(), nullable=True),
        sa.Column("occurrence_id", sa.BigInteger(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("said_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heard_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("disposition", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("raw", sa.Text(), nullable=False),
        sa.CheckConstraint(PROVIDERS, name=op.f("ck_notice_hearings_provider_known")),
        sa.CheckConstraint(DISPOSITIONS, name=op.f("ck_notice_hearings_disposition_known")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_notice_hearings_node_id")),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.lease_id"], name=op.f("fk_notice_hearings_lease_id")),
        sa.PrimaryKeyConstraint("hearing_id", name=op.f("pk_notice_hearings")),
    )
    op.create_index(
        "uq_notice_hearings_message",
        "notice_hearings",
        ["channel", "message_id", "provider_id"],
        unique=True,
        postgresql_nulls_not_distinct=True,
    )
    op.create_index("ix_notice_hearings_node", "notice_hearings", ["node_id", "channel", "hearing_id"])
    op.create_index("ix_notice_hearings_heard", "notice_hearings", ["heard_at"])
    op.create_index("ix_notice_hearings_occurrence", "notice_hearings", ["occurrence_id"])
    op.create_table(
        "notice_hearing_counts",
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("disposition", sa.Text(), nullable=False),
        sa.Column("heard", sa.BigInteger(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("example", sa.Text(), nullable=False),
        sa.CheckConstraint(DISPOSITIONS, name=op.f("ck_notice_hearing_counts_disposition_known")),
        sa.PrimaryKeyConstraint("channel", "disposition", name=op.f("pk_notice_hearing_counts")),
    )
    op.create_table(
        "cloud_channels",
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("ok_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("trouble", sa.Text(), nullable=False),
        sa.Column("trouble_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("trouble_since", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(PROVIDERS, name=op.f("ck_cloud_channels_provider_known")),
        sa.PrimaryKeyConstraint("channel", name=op.f("pk_cloud_channels")),
    )


def downgrade() -> None:
    op.drop_table("cloud_channels")
    op.drop_table("notice_hearing_counts")
    op.drop_table("notice_hearings")
    op.drop_index("ix_notices_first_of_node", "notices")
    op.drop_index("ix_notices_first", "notices")
    op.drop_index("ix_notices_occurrence", "notices")
    op.drop_column("notices", "occurrence_id")
    op.drop_index("uq_instances_provider_id", "instances")
    # Of a name that several machines had, one after the other, only the newest keeps it.
    op.execute(
        """
        UPDATE instances SET provider_id = NULL WHERE EXISTS (
            SELECT FROM instances AS newer WHERE newer.provider = instances.provider
               AND newer.provider_id = instances.provider_id AND newer.instance_id > instances.instance_id)
        """
    )
    op.create_index(
        "uq_instances_provider_id", "instances", ["provider", "provider_id"], unique=True, postgresql_where=KNOWN
    )
    op.drop_column("instances", "zone")
    op.drop_column("nodes", "zone")
    op.drop_column("nodes", "provider_id")
