"""Browser sessions, and what the nodes of a pool would cost on demand."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "browser_sessions",
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["token_id"], ["tokens.token_id"], name="fk_browser_sessions_token_id_tokens", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("secret_sha256", name="pk_browser_sessions"),
    )
    op.create_index("ix_browser_sessions_token", "browser_sessions", ["token_id", "created_at"])
    op.create_index("ix_browser_sessions_expires", "browser_sessions", ["expires_at"])
    op.add_column("pool_prices", sa.Column("on_demand_usd_per_hour", sa.Numeric(), nullable=True))
    op.create_check_constraint(
        op.f("ck_pool_prices_on_demand_not_negative"), "pool_prices", "on_demand_usd_per_hour >= 0"
    )


def downgrade() -> None:
    op.drop_constraint(op.f("ck_pool_prices_on_demand_not_negative"), "pool_prices", type_="check")
    op.drop_column("pool_prices", "on_demand_usd_per_hour")
    op.drop_table("browser_sessions")
