"""Jobs that make no step for far longer than steps take, and a cause of their own for that time."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

LEDGERS = ("ledger", "ledger_sums")
BEFORE = ("productive", "bootstrap", "pause", "recompute", "idle", "lost", "fallback_restart")


def upgrade() -> None:
    column = postgresql.JSONB(none_as_null=True, astext_type=sa.Text())
    op.add_column("jobs", sa.Column("standstill", column, nullable=True))
    _allow((*BEFORE, "stalled"))


def downgrade() -> None:
    op.execute("UPDATE ledger SET cause = 'productive' WHERE cause = 'stalled'")
    op.execute("UPDATE ledger_sums SET cause = 'productive', merged = false WHERE cause = 'stalled'")
    _allow(BEFORE)
    op.drop_column("jobs", "standstill")


def _allow(causes: tuple[str, ...]) -> None:
    known = ", ".join(f"'{cause}'" for cause in causes)
    for table in LEDGERS:
        op.drop_constraint(op.f(f"ck_{table}_cause_known"), table, type_="check")
        op.create_check_constraint(op.f(f"ck_{table}_cause_known"), table, f"cause IN ({known})")
