"""Roles for people, tokens of single nodes, and the audit log."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

FORMER = {"operator": "script", "join": "agent"}


def upgrade() -> None:
    op.drop_constraint(op.f("ck_tokens_role_known"), "tokens", type_="check")
    for role, former in FORMER.items():
        op.execute(f"UPDATE tokens SET role = '{role}' WHERE role = '{former}'")
        op.execute(f"UPDATE tokens SET name = 'first-{role}' WHERE name = 'first-{former}'")
    op.add_column("tokens", sa.Column("node_id", sa.Text(), nullable=True))
    op.add_column("tokens", sa.Column("uses_left", sa.BigInteger(), nullable=True))
    op.add_column("tokens", sa.Column("created_by", sa.Text(), nullable=True))
    roles = "'viewer', 'operator', 'admin', 'join', 'node_key', 'node'"
    op.create_check_constraint(op.f("ck_tokens_role_known"), "tokens", f"role IN ({roles})")
    op.create_check_constraint(
        op.f("ck_tokens_node_bound"), "tokens", "node_id IS NOT NULL OR role NOT IN ('node_key', 'node')"
    )
    op.create_check_constraint(op.f("ck_tokens_uses_not_negative"), "tokens", "uses_left >= 0")
    op.create_index(op.f("ix_tokens_node_id"), "tokens", ["node_id"])
    op.create_table(
        "audit",
        sa.Column("audit_id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("detail", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_target"), "audit", ["target"])


def downgrade() -> None:
    op.drop_table("audit")
    op.execute("DELETE FROM tokens WHERE role IN ('viewer', 'node_key', 'node')")
    op.drop_index(op.f("ix_tokens_node_id"), table_name="tokens")
    for name in ("role_known", "node_bound", "uses_not_negative"):
        op.drop_constraint(op.f(f"ck_tokens_{name}"), "tokens", type_="check")
    for role, former in FORMER.items():
        op.execute(f"UPDATE tokens SET role = '{former}' WHERE role = '{role}'")
        op.execute(f"UPDATE tokens SET name = 'first-{former}' WHERE name = 'first-{role}'")
    op.create_check_constraint(op.f("ck_tokens_role_known"), "tokens", "role IN ('admin', 'script', 'agent')")
    for name in ("created_by", "uses_left", "node_id"):
        op.drop_column("tokens", name)
