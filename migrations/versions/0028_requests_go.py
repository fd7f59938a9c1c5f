"""Requests for machines that ended long ago go, and their machines stay."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

KEY = "fk_instances_request_id"


def upgrade() -> None:
    op.alter_column("instances", "request_id", existing_type=sa.BigInteger(), nullable=True)
    op.drop_constraint(op.f(KEY), "instances")
    op.create_foreign_key(
        op.f(KEY), "instances", "capacity_requests", ["request_id"], ["request_id"], ondelete="SET NULL"
    )
    op.create_index("ix_capacity_requests_ended", "capacity_requests", ["ended_at"],
                    postgresql_where=sa.text("ended_at IS NOT NULL"))  # fmt: skip


def downgrade() -> None:
    # Each machine needs a request again.
    op.execute(
        """
        WITH without AS (
             SELECT instance_id, provider, pool, known_since,
                    nextval(pg_get_serial_sequence('capacity_requests', 'request_id')) AS request_id
               FROM instances WHERE request_id IS NULL),
        asked AS (
             INSERT INTO capacity_requests
                    (request_id, provider, pool, machines, asked_by, asked_at, ended_at, end_reason)
             OVERRIDING SYSTEM VALUE
             SELECT request_id, provider, pool, 1, 'not known any more', known_since, known_since,
                    'the machine has come' FROM without)
        UPDATE instances SET request_id = without.request_id
          FROM without WHERE without.instance_id = instances.instance_id
        """
    )
    op.drop_index("ix_capacity_requests_ended", "capacity_requests")
    op.drop_constraint(op.f(KEY), "instances")
    op.create_foreign_key(op.f(KEY), "instances", "capacity_requests", ["request_id"], ["request_id"])
    op.alter_column("instances", "request_id", existing_type=sa.BigInteger(), nullable=False)
