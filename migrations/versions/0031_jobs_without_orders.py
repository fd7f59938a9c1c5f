"""Why a job gets no orders, and a bound for the number of its next generation: no order carries a greater one."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

NEXT_MAX = 2**53 - 1 - 100_000
MADE_UP = "the number of its world was made up"


def upgrade() -> None:
    # A greater one was made up: the number after the highest that was used takes its place. Where a world with such a
    # number is active, no order can name it: the world before takes its place, and the job starts again.
    op.execute(
        f"""
        UPDATE jobs SET state = 'suspended', reason = '{MADE_UP}', suspended_because = '{MADE_UP}'
         WHERE active_generation >= {NEXT_MAX} AND state IN ('starting', 'running')
        """
    )
    op.execute(
        f"""
        UPDATE jobs SET suspends_at = NULL, active_generation =
               (SELECT max(generation) FROM job_generations
                 WHERE job_generations.job_id = jobs.job_id AND generation < {NEXT_MAX})
         WHERE active_generation >= {NEXT_MAX}
        """
    )
    op.execute(f"DELETE FROM job_generations WHERE generation >= {NEXT_MAX}")
    op.execute(
        f"""
        UPDATE jobs SET next_generation = 1 + greatest(0,
               (SELECT max(generation) FROM job_generations WHERE job_generations.job_id = jobs.job_id),
               (SELECT max(generation) FROM handoffs
                 WHERE handoffs.job_id = jobs.job_id AND generation < {NEXT_MAX}))
         WHERE next_generation > {NEXT_MAX}
        """
    )
    # A table of which rows are still to be checked at the end of the transaction cannot be altered.
    op.execute("SET CONSTRAINTS ALL IMMEDIATE")
    op.create_check_constraint(op.f("ck_jobs_next_generation_bounded"), "jobs", f"next_generation <= {NEXT_MAX}")
    op.add_column("jobs", sa.Column("no_orders_because", sa.Text(), nullable=False, server_default=""))
    op.create_index("ix_jobs_without_orders", "jobs", ["job_id"], postgresql_where=sa.text("no_orders_because <> ''"))


def downgrade() -> None:
    op.drop_index("ix_jobs_without_orders", "jobs")
    op.drop_column("jobs", "no_orders_because")
    op.drop_constraint(op.f("ck_jobs_next_generation_bounded"), "jobs")
