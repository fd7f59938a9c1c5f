"""Jobs and what belongs to one: generations, members, steps, rank logs, checkpoints."""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Identity, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from liver_core.handoff.generations import PLACES
from liver_core.layout.limits import GENERATION_MAX
from service.db.base import Base, Claimed, Json, JsonList, one_of

NEXT_GENERATION_MAX = GENERATION_MAX - PLACES
"""Room for one more start."""
RANDOM_PART_CHARS = 8
"""A job's id ends in so many random characters behind its name."""


class JobState(StrEnum):
    """Where a job stands. `suspending` and `stopping` wait for the ranks to end."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


ENDED = (JobState.STOPPED, JobState.FINISHED, JobState.FAILED)


class SourceKind(StrEnum):
    """What a generation was made from."""

    INIT = "init"
    CHECKPOINT = "checkpoint"
    HANDOFF = "handoff"


def shown_reason(reason: str, no_orders_because: str) -> str:
    """Why a job stands as it does, for people."""
    if not no_orders_because:
        return reason
    return f"its nodes get no orders, since none can be made: {no_orders_because}; {reason}"


class JobRow(Claimed, Base):
    """One job. `active_generation` changes only by compare-and-set; `due_at` is null once the job has ended.
    `suspended_because`: kept until the job starts again, while `reason` says what it waits for. `suspends_at`: when its
    agents end its ranks, unless that is called off before. `paused_because`: who
    asked for a pause; empty if nobody did. `standstill`: since when it makes no step, why, and which hook of it runs
    meanwhile; null while steps come in their time. `emptied_at`: when its steps were deleted, long after its end.
    `damaged_step`: that of the last damaged checkpoint; starts look for none up to it that nobody has heard of.
    `from_step`: the step that somebody had the job go back to. What worlds before generation `from_generation` wrote
    of later steps is left behind. `peer_key_at`: when the current key was made; `peer_key_before` is valid too, until
    it is dropped. `no_orders_because`: what is stored of the job makes no order, so that its nodes get none; empty
    where it does."""

    __tablename__ = "jobs"
    __table_args__ = (
        one_of("state", JobState),
        CheckConstraint("next_generation >= 1", name="next_generation_positive"),
        CheckConstraint(f"next_generation <= {NEXT_GENERATION_MAX}", name="next_generation_bounded"),
        CheckConstraint("active_generation < next_generation", name="active_generation_was_burned"),
        ForeignKeyConstraint(
            ["job_id", "active_generation"],
            ["job_generations.job_id", "job_generations.generation"],
            name="fk_jobs_active_generation",
            use_alter=True,
            deferrable=True,
            initially="DEFERRED",
        ),
        Index("ix_jobs_due", "due_at", postgresql_where="due_at IS NOT NULL"),
        Index("ix_jobs_without_orders", "job_id", postgresql_where="no_orders_because <> ''"),
        Index(
            "ix_jobs_full",
            "state_changed_at",
            postgresql_where="due_at IS NULL AND (emptied_at IS NULL OR emptied_at < state_changed_at)",
        ),
    )

    job_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    spec: Mapped[Json]
    peer_key: Mapped[str]
    peer_key_before: Mapped[str | None] = mapped_column(default=None)
    peer_key_number: Mapped[int] = mapped_column(default=1)
    peer_key_at: Mapped[datetime]
    state: Mapped[str] = mapped_column(index=True)
    reason: Mapped[str] = mapped_column(default="")
    warning: Mapped[str] = mapped_column(default="")
    stop_requested_at: Mapped[datetime | None] = mapped_column(default=None)
    active_generation: Mapped[int | None] = mapped_column(default=None)
    next_generation: Mapped[int] = mapped_column(default=1)
    failed_starts: Mapped[int] = mapped_column(default=0)
    crashes: Mapped[Json] = mapped_column(default=dict)
    last_step: Mapped[int] = mapped_column(default=0)
    last_step_at: Mapped[datetime | None] = mapped_column(default=None)
    highest_step: Mapped[int] = mapped_column(default=0)
    lost_steps: Mapped[int] = mapped_column(default=0)
    error_at: Mapped[datetime | None] = mapped_column(default=None)
    standstill: Mapped[Json | None] = mapped_column(default=None)
    suspended_because: Mapped[str] = mapped_column(default="")
    suspends_at: Mapped[datetime | None] = mapped_column(default=None)
    paused_because: Mapped[str] = mapped_column(default="")
    checkpoints_asked: Mapped[int] = mapped_column(default=0)
    checkpoints_answered: Mapped[int] = mapped_column(default=0)
    damaged_step: Mapped[int] = mapped_column(default=0)
    from_step: Mapped[int | None] = mapped_column(default=None)
    from_generation: Mapped[int] = mapped_column(default=0)
    # Plans name a thousand ranks each, and only who makes orders or plans needs them: read when they are asked for.
    standing_plans: Mapped[JsonList] = mapped_column(default=list, deferred=True)
    layouts_by_count: Mapped[JsonList] = mapped_column(default=list, deferred=True)
    spares: Mapped[JsonList] = mapped_column(default=list)
    plan_digest: Mapped[str] = mapped_column(default="")
    orders_seq: Mapped[int] = mapped_column(default=0)
    no_orders_because: Mapped[str] = mapped_column(default="")
    created_at: Mapped[datetime] = mapped_column(index=True)
    state_changed_at: Mapped[datetime]
    due_at: Mapped[datetime | None] = mapped_column(default=None)
    emptied_at: Mapped[datetime | None] = mapped_column(default=None)

    @property
    def is_stalled(self) -> bool:
        """Whether its world stands still, and no hook of it runs."""
        return self.standstill is not None and not self.standstill["hook"]

    @property
    def awaits_checkpoint(self) -> bool:
        """Whether a checkpoint that was asked for is not complete yet."""
        return self.checkpoints_asked > self.checkpoints_answered

    @property
    def shown_reason(self) -> str:
        """Why the job stands as it does, for people."""
        return shown_reason(self.reason, self.no_orders_because)


class GenerationRow(Base):
    """One generation of one job: a number used once. `origin_id` names the handoff or the start that made it.
    `repeats_until`: the highest step of the job when it was started again; up to it, steps are made once more.
    `ended_by`: the first cause of its end, final once an agent has named it; null while it lives and where nothing
    failed. `steps_from_at`: before, an older world may step on, and the ranks of this one wait; null where none can."""

    __tablename__ = "job_generations"
    __table_args__ = (
        one_of("source_kind", SourceKind),
        CheckConstraint("generation >= 1", name="generation_positive"),
        CheckConstraint("(source_kind = 'checkpoint') = (checkpoint_path IS NOT NULL)", name="checkpoint_has_path"),
    )

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    origin_id: Mapped[UUID] = mapped_column(unique=True)
    parent: Mapped[int | None]
    source_kind: Mapped[str]
    checkpoint_path: Mapped[str | None] = mapped_column(default=None)
    checkpoint_step: Mapped[int | None] = mapped_column(default=None)
    layout: Mapped[str]
    nodes: Mapped[int]
    roster: Mapped[Json]
    reason: Mapped[str]
    lost_steps: Mapped[int] = mapped_column(default=0)
    repeats_until: Mapped[int] = mapped_column(default=0)
    store_node: Mapped[str | None] = mapped_column(default=None)
    store_host: Mapped[str | None] = mapped_column(default=None)
    store_port: Mapped[int | None] = mapped_column(default=None)
    created_at: Mapped[datetime]
    first_step_at: Mapped[datetime | None] = mapped_column(default=None)
    ended_by: Mapped[Json | None] = mapped_column(default=None)
    steps_from_at: Mapped[datetime | None] = mapped_column(default=None)


class MemberRole(StrEnum):
    """Member of the active world, target of an open handoff, or a spare that a standing plan counts on."""

    MEMBER = "member"
    TARGET = "target"
    SPARE = "spare"


class JobMemberRow(Base):
    """The nodes that get a job's orders. A node works for one job at a time; it may be the spare of several."""

    __tablename__ = "job_members"
    __table_args__ = (
        one_of("role", MemberRole),
        Index("uq_job_members_working_node", "node_id", unique=True, postgresql_where="role <> 'spare'"),
    )

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"), primary_key=True, index=True)
    role: Mapped[str]


class JobGrantRow(Base):
    """The service has let a node see and speak of a job (`role`), or has taken that back: without a role, what the node
    still has to say is heard until `ends_at`. The newest row of a node counts. Rows are only ever added."""

    __tablename__ = "job_grants"
    __table_args__ = (
        one_of("role", MemberRole),
        CheckConstraint("(role IS NULL) = (ends_at IS NOT NULL)", name="ends_without_role"),
        Index("ix_job_grants_newest", "job_id", "node_id", "grant_id"),
        Index("ix_job_grants_node", "node_id"),
        Index("ix_job_grants_ends", "job_id", "ends_at", postgresql_where="role IS NULL"),
    )

    grant_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"))
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"))
    role: Mapped[str | None]
    at: Mapped[datetime]
    ends_at: Mapped[datetime | None]


class HeldFactRow(Base):
    """A fact about a generation that the service does not know yet: it waits for the report of the handoff that made
    that generation. `part`: the list of the report that it came in. Bounded, and dropped after a while."""

    __tablename__ = "held_facts"
    __table_args__ = (Index("ix_held_facts_job", "job_id", "node_id"), Index("ix_held_facts_held", "held_at"))

    held_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"))
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id"))
    generation: Mapped[int]
    part: Mapped[str]
    fact: Mapped[Json]
    held_at: Mapped[datetime]


class JobStepRow(Base):
    """One finished step in one generation. Old rows are dropped; the job keeps the totals."""

    __tablename__ = "steps"
    __table_args__ = (Index("ix_steps_job_finished", "job_id", "finished_at"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    seconds: Mapped[float]
    loss: Mapped[float | None]
    consumed_samples: Mapped[int | None]
    sample_digest: Mapped[str | None]
    tokens: Mapped[int | None]
    finished_at: Mapped[datetime]


class RankLogRow(Base):
    """A piece of one rank's output. Bounded per job, oldest first."""

    __tablename__ = "rank_logs"
    __table_args__ = (
        UniqueConstraint("job_id", "generation", "rank", "start_offset"),
        Index("ix_rank_logs_job", "job_id", "log_id"),
    )

    log_id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"))
    generation: Mapped[int]
    rank: Mapped[int]
    start_offset: Mapped[int]
    text: Mapped[str]
    recorded_at: Mapped[datetime]


class LogSizeRow(Base):
    """How much output of a job is stored, in characters, as counted up to a piece."""

    __tablename__ = "log_sizes"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    chars: Mapped[int]
    counted_to: Mapped[int]


class CheckpointRow(Base):
    """One complete checkpoint. A restart uses the newest that is not damaged. `damage`: why no world can load it, as
    ranks of generation `damaged_in` found; null where nothing is known of that."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index("ix_checkpoints_job_step", "job_id", "step"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    generation: Mapped[int]
    step: Mapped[int]
    finished_at: Mapped[datetime]
    size_bytes: Mapped[int | None]
    seconds: Mapped[float | None]
    damage: Mapped[str | None] = mapped_column(default=None)
    damaged_in: Mapped[int | None] = mapped_column(default=None)
