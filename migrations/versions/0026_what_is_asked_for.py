"""How what a request asks for is sold, and where it must be. Requests of people say neither."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("capacity_requests", sa.Column("market", sa.Text(), nullable=True))
    op.add_column("capacity_requests", sa.Column("place", sa.Text(), nullable=False, server_default=""))
    op.create_check_constraint(
        op.f("ck_capacity_requests_market_known"), "capacity_requests", "market IN ('spot', 'on_demand')"
    )
    op.create_index("ix_capacity_requests_asked_by", "capacity_requests", ["asked_by", "ended_at"],
                    postgresql_where=sa.text("market IS NOT NULL"))  # fmt: skip


def downgrade() -> None:
    op.drop_index("ix_capacity_requests_asked_by", "capacity_requests")
    op.drop_constraint(op.f("ck_capacity_requests_market_known"), "capacity_requests")
    op.drop_column("capacity_requests", "place")
    op.drop_column("capacity_requests", "market")
