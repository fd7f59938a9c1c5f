"""What was announced lately, and handoffs in one state, are found without reading all that is kept."""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_notices_first_recorded", "notices", ["recorded_at"],
                    postgresql_where=sa.text("notice_id = occurrence_id"))  # fmt: skip
    op.create_index("ix_handoffs_state_opened", "handoffs", ["state", "opened_at", "handoff_id"])


def downgrade() -> None:
    op.drop_index("ix_handoffs_state_opened", "handoffs")
    op.drop_index("ix_notices_first_recorded", "notices")
