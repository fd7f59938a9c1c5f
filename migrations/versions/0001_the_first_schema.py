"""The first schema: jobs, nodes, leases, notices, handoffs, the ledger and tokens."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    "jobs",
    "nodes",
    "pool_prices",
    "tokens",
    "agent_incarnations",
    "checkpoints",
    "handoffs",
    "job_generations",
    "job_members",
    "leases",
    "rank_logs",
    "steps",
    "ledger",
    "notices",
)


def upgrade() -> None:
    op.execute("CREATE SEQUENCE orders_seq")
    _create_jobs()
    _create_nodes()
    _create_pool_prices()
    _create_tokens()
    _create_agent_incarnations()
    _create_checkpoints()
    _create_handoffs()
    _create_job_generations()
    _create_job_members()
    _create_leases()
    _create_rank_logs()
    _create_steps()
    _create_ledger()
    _create_notices()
    # A job points at its active generation and every generation at its job, so one of the two comes afterwards.
    op.create_foreign_key(
        "fk_jobs_active_generation",
        "jobs",
        "job_generations",
        ["job_id", "active_generation"],
        ["job_id", "generation"],
        deferrable=True,
        initially="DEFERRED",
    )


def downgrade() -> None:
    op.drop_constraint("fk_jobs_active_generation", "jobs", type_="foreignkey")
    for table in reversed(TABLES):
        op.drop_table(table)
    op.execute("DROP SEQUENCE orders_seq")


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("spec", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("peer_key", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("stop_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("active_generation", sa.BigInteger(), nullable=True),
        sa.Column("next_generation", sa.BigInteger(), nullable=False),
        sa.Column("failed_starts", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("highest_step", sa.BigInteger(), nullable=False),
        sa.Column("lost_steps", sa.BigInteger(), nullable=False),
        sa.Column("standing_plans", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("layouts_by_count", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("plan_digest", sa.Text(), nullable=False),
        sa.Column("orders_seq", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state_changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("claim_token", sa.Uuid(), nullable=True),
        sa.Column("claim_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('pending', 'starting', 'running', 'suspending', 'suspended', 'stopping', 'stopped', 'finished', 'failed')",  # noqa: E501
            name=op.f("ck_jobs_state_known"),
        ),
        sa.CheckConstraint("active_generation < next_generation", name=op.f("ck_jobs_active_generation_was_burned")),
        sa.CheckConstraint("next_generation >= 1", name=op.f("ck_jobs_next_generation_positive")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_created_at"), "jobs", ["created_at"], unique=False)
    op.create_index("ix_jobs_due", "jobs", ["due_at"], unique=False, postgresql_where="due_at IS NOT NULL")
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"], unique=False)


def _create_nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("peer_url", sa.Text(), nullable=False),
        sa.Column("private_address", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("agent_version", sa.Text(), nullable=False),
        sa.Column("agent_incarnation", sa.Uuid(), nullable=False),
        sa.Column("report_seq", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ranks", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.CheckConstraint("provider IN ('aws', 'gcp', 'none')", name=op.f("ck_nodes_provider_known")),
        sa.CheckConstraint("state IN ('ready', 'silent', 'gone')", name=op.f("ck_nodes_state_known")),
        sa.CheckConstraint("report_seq >= 0", name=op.f("ck_nodes_report_seq_not_negative")),
        sa.CheckConstraint("slots BETWEEN 1 AND 1024", name=op.f("ck_nodes_slots_bounded")),
        sa.PrimaryKeyConstraint("node_id", name=op.f("pk_nodes")),
    )
    op.create_index(
        "ix_nodes_live_last_seen", "nodes", ["last_seen_at"], unique=False, postgresql_where="state <> 'gone'"
    )


def _create_pool_prices() -> None:
    op.create_table(
        "pool_prices",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("effective_from", sa.DateTime(timezone=True), nullable=False),
        sa.Column("price_usd_per_hour", sa.Double(), nullable=False),
        sa.CheckConstraint("price_usd_per_hour >= 0", name=op.f("ck_pool_prices_price_not_negative")),
        sa.PrimaryKeyConstraint("pool", "effective_from", name=op.f("pk_pool_prices")),
    )


def _create_tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("role IN ('admin', 'script', 'agent')", name=op.f("ck_tokens_role_known")),
        sa.PrimaryKeyConstraint("token_id", name=op.f("pk_tokens")),
    )


def _create_agent_incarnations() -> None:
    op.create_table(
        "agent_incarnations",
        sa.Column("incarnation", sa.Uuid(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_agent_incarnations_node_id")),
        sa.PrimaryKeyConstraint("incarnation", name=op.f("pk_agent_incarnations")),
    )
    op.create_index(op.f("ix_agent_incarnations_node_id"), "agent_incarnations", ["node_id"], unique=False)


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_checkpoints_job_id")),
        sa.PrimaryKeyConstraint("job_id", "path", name=op.f("pk_checkpoints")),
    )
    op.create_index("ix_checkpoints_job_step", "checkpoints", ["job_id", "step"], unique=False)


def _create_handoffs() -> None:
    op.create_table(
        "handoffs",
        sa.Column("handoff_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.Column("plan_revision", sa.BigInteger(), nullable=False),
        sa.Column("plan_digest", sa.Text(), nullable=False),
        sa.Column("mirror_seq", sa.BigInteger(), nullable=False),
        sa.Column("proposer", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("rung", sa.Text(), nullable=False),
        sa.Column("source", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("target", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("source_layout", sa.Text(), nullable=False),
        sa.Column("target_layout", sa.Text(), nullable=False),
        sa.Column("leaving", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("decision", sa.Text(), nullable=True),
        sa.Column("superseded", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("reason_detail", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("measures", sa.JSON(), nullable=False),
        sa.Column("pause_charged", sa.Boolean(), nullable=False),
        sa.CheckConstraint(
            "cause IN ('notice', 'grow', 'request', 'rebalance', 'start', 'checkpoint')",
            name=op.f("ck_handoffs_cause_known"),
        ),
        sa.CheckConstraint(
            "decision IN ('undecided', 'go', 'go_redo', 'no_go')", name=op.f("ck_handoffs_decision_known")
        ),
        sa.CheckConstraint(
            "generation IS NOT NULL OR state IN ('proposed', 'aborted', 'broken')",
            name=op.f("ck_handoffs_opened_has_generation"),
        ),
        sa.CheckConstraint(
            "rung IN ('live', 'drop_step', 'stop_and_copy', 'rescue', 'replica', 'checkpoint', 'suspend')",
            name=op.f("ck_handoffs_rung_known"),
        ),
        sa.CheckConstraint(
            "state IN ('proposed', 'preparing', 'streaming', 'ready', 'cutting_over', 'active', 'aborted', 'broken')",
            name=op.f("ck_handoffs_state_known"),
        ),
        sa.CheckConstraint(
            "generation IS NULL OR generation > parent", name=op.f("ck_handoffs_generation_above_parent")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_handoffs_job_id")),
        sa.PrimaryKeyConstraint("handoff_id", name=op.f("pk_handoffs")),
        sa.UniqueConstraint("job_id", "generation", name=op.f("uq_handoffs_job_id_generation")),
    )
    op.create_index(
        "ix_handoffs_open",
        "handoffs",
        ["job_id"],
        unique=False,
        postgresql_where="state IN ('proposed', 'preparing', 'streaming', 'ready', 'cutting_over')",
    )
    op.create_index("ix_handoffs_opened", "handoffs", ["opened_at"], unique=False)


def _create_job_generations() -> None:
    op.create_table(
        "job_generations",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("origin_id", sa.Uuid(), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=True),
        sa.Column("source_kind", sa.Text(), nullable=False),
        sa.Column("checkpoint_path", sa.Text(), nullable=True),
        sa.Column("checkpoint_step", sa.BigInteger(), nullable=True),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("nodes", sa.BigInteger(), nullable=False),
        sa.Column("roster", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("lost_steps", sa.BigInteger(), nullable=False),
        sa.Column("store_node", sa.Text(), nullable=True),
        sa.Column("store_host", sa.Text(), nullable=True),
        sa.Column("store_port", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("first_step_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(source_kind = 'checkpoint') = (checkpoint_path IS NOT NULL)",
            name=op.f("ck_job_generations_checkpoint_has_path"),
        ),
        sa.CheckConstraint(
            "source_kind IN ('init', 'checkpoint', 'handoff')", name=op.f("ck_job_generations_source_kind_known")
        ),
        sa.CheckConstraint("generation >= 1", name=op.f("ck_job_generations_generation_positive")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_job_generations_job_id")),
        sa.PrimaryKeyConstraint("job_id", "generation", name=op.f("pk_job_generations")),
        sa.UniqueConstraint("origin_id", name=op.f("uq_job_generations_origin_id")),
    )


def _create_job_members() -> None:
    op.create_table(
        "job_members",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.CheckConstraint("role IN ('member', 'target', 'spare')", name=op.f("ck_job_members_role_known")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_job_members_job_id")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_job_members_node_id")),
        sa.PrimaryKeyConstraint("job_id", "node_id", name=op.f("pk_job_members")),
    )
    op.create_index(op.f("ix_job_members_node_id"), "job_members", ["node_id"], unique=False)
    op.create_index(
        "uq_job_members_working_node", "job_members", ["node_id"], unique=True, postgresql_where="role <> 'spare'"
    )


def _create_leases() -> None:
    op.create_table(
        "leases",
        sa.Column("lease_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.CheckConstraint("ended_at IS NULL OR ended_at >= started_at", name=op.f("ck_leases_ends_after_start")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_leases_node_id")),
        sa.PrimaryKeyConstraint("lease_id", name=op.f("pk_leases")),
    )
    op.create_index("ix_leases_node_started", "leases", ["node_id", "started_at"], unique=False)
    op.create_index("uq_leases_open_node", "leases", ["node_id"], unique=True, postgresql_where="ended_at IS NULL")


def _create_rank_logs() -> None:
    op.create_table(
        "rank_logs",
        sa.Column("log_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("start_offset", sa.BigInteger(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_rank_logs_job_id")),
        sa.PrimaryKeyConstraint("log_id", name=op.f("pk_rank_logs")),
        sa.UniqueConstraint(
            "job_id",
            "generation",
            "rank",
            "start_offset",
            name=op.f("uq_rank_logs_job_id_generation_rank_start_offset"),
        ),
    )
    op.create_index("ix_rank_logs_job", "rank_logs", ["job_id", "log_id"], unique=False)


def _create_steps() -> None:
    op.create_table(
        "steps",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("consumed_samples", sa.BigInteger(), nullable=True),
        sa.Column("sample_digest", sa.Text(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_steps_job_id")),
        sa.PrimaryKeyConstraint("job_id", "generation", "step", name=op.f("pk_steps")),
    )
    op.create_index("ix_steps_job_finished", "steps", ["job_id", "finished_at"], unique=False)


def _create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("interval_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("lease_id", sa.BigInteger(), nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("follows", sa.DateTime(timezone=True), nullable=True),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("generation", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "cause IN ('productive', 'bootstrap', 'pause', 'recompute', 'idle', 'lost', 'fallback_restart')",
            name=op.f("ck_ledger_cause_known"),
        ),
        sa.CheckConstraint("ends_at > starts_at", name=op.f("ck_ledger_not_empty")),
        sa.CheckConstraint("follows IS NULL OR follows = starts_at", name=op.f("ck_ledger_starts_where_it_follows")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_ledger_job_id")),
        sa.ForeignKeyConstraint(
            ["lease_id", "slot", "follows"],
            ["ledger.lease_id", "ledger.slot", "ledger.ends_at"],
            name="fk_ledger_follows",
            initially="DEFERRED",
            deferrable=True,
        ),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.lease_id"], name=op.f("fk_ledger_lease_id")),
        sa.PrimaryKeyConstraint("interval_id", name=op.f("pk_ledger")),
        sa.UniqueConstraint("lease_id", "slot", "ends_at", name=op.f("uq_ledger_lease_id_slot_ends_at")),
        sa.UniqueConstraint("lease_id", "slot", "follows", name=op.f("uq_ledger_lease_id_slot_follows")),
    )
    op.create_index("ix_ledger_job", "ledger", ["job_id", "starts_at"], unique=False)
    op.create_index("uq_ledger_first", "ledger", ["lease_id", "slot"], unique=True, postgresql_where="follows IS NULL")


def _create_notices() -> None:
    op.create_table(
        "notices",
        sa.Column("notice_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("lease_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("raw", sa.Text(), nullable=False),
        sa.CheckConstraint("kind IN ('interruption', 'maintenance', 'rebalance')", name=op.f("ck_notices_kind_known")),
        sa.ForeignKeyConstraint(["lease_id"], ["leases.lease_id"], name=op.f("fk_notices_lease_id")),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.node_id"], name=op.f("fk_notices_node_id")),
        sa.PrimaryKeyConstraint("notice_id", name=op.f("pk_notices")),
        sa.UniqueConstraint(
            "lease_id",
            "kind",
            "deadline_at",
            name=op.f("uq_notices_lease_id_kind_deadline_at"),
            postgresql_nulls_not_distinct=True,
        ),
    )
    op.create_index(op.f("ix_notices_node_id"), "notices", ["node_id"], unique=False)
    op.create_index(op.f("ix_notices_recorded_at"), "notices", ["recorded_at"], unique=False)
