"""What the REST API returns about jobs."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from agent.protocol.jobfile import JobFile
from service.incidents.tables import IncidentKind, JobIncidentRow
from service.jobs.causes import FirstCause
from service.jobs.checkpoints import is_left_behind
from service.jobs.tables import CheckpointRow, GenerationRow, JobRow, JobState, JobStepRow, RankLogRow, SourceKind


class GenerationOut(BaseModel):
    """One generation: a world the job has run in."""

    generation: int
    parent: int | None
    origin_id: str = Field(description="The handoff that made it, or the id of the start.")
    source: SourceKind
    checkpoint_step: int | None
    layout: Annotated[str, Field(examples=["TP2xPP2xDP1"])]
    nodes: list[str]
    members: list[dict[str, Any]] = Field(description="Node and slot of each rank, in rank order.")
    reason: str
    lost_steps: int
    created_at: datetime
    first_step_at: datetime | None
    ended_by: FirstCause | None = Field(description="The first cause of its end; null while it lives.")

    @classmethod
    def of(cls, row: GenerationRow) -> "GenerationOut":
        """From its row."""
        members = row.roster["members"]
        return cls(
            generation=row.generation,
            parent=row.parent,
            origin_id=str(row.origin_id),
            source=SourceKind(row.source_kind),
            checkpoint_step=row.checkpoint_step,
            layout=row.layout,
            nodes=list(dict.fromkeys(member["node_id"] for member in members)),
            members=members,
            reason=row.reason,
            lost_steps=row.lost_steps,
            created_at=row.created_at,
            first_step_at=row.first_step_at,
            ended_by=FirstCause.of(row.ended_by),
        )


class StandstillOut(BaseModel):
    """That a job which runs makes no step for far longer than its steps take."""

    since: datetime = Field(description="When its last step ended.")
    because: str = Field(description="Which rank the others wait for and where it stands, as far as it is known.")
    hook: str = Field(description="What the job runs between steps meanwhile; empty: nothing, it stands still.")


class JobSummary(BaseModel):
    """One line of the job list."""

    job_id: Annotated[str, Field(examples=["gpt-small-1a2b3c4d"])]
    name: str
    state: JobState
    reason: str = Field(description="Why the job is in this state, or what it waits for.")
    warning: str = Field(default="", description="What goes wrong although the job goes on; empty where nothing does.")
    paused: bool = Field(default=False, description="Somebody asked that it stands until it is resumed.")
    suspends_at: datetime | None = Field(
        description="When its ranks end, with a checkpoint: nodes will go, and nothing fits what stays. "
        "Called off if nodes come before."
    )
    standstill: StandstillOut | None = Field(description="Null while steps come in their time.")
    active_generation: int | None
    layout: str | None
    nodes: list[str]
    last_step: int
    stop_steps: int
    lost_steps: int
    created_at: datetime
    state_changed_at: datetime

    @classmethod
    def of(cls, row: JobRow, active: GenerationRow | None) -> "JobSummary":
        """From its row and the row of its active generation."""
        generation = GenerationOut.of(active) if active else None
        return cls(
            job_id=row.job_id,
            name=row.name,
            state=JobState(row.state),
            reason=row.shown_reason,
            warning=row.warning,
            paused=bool(row.paused_because),
            suspends_at=row.suspends_at,
            standstill=None if row.standstill is None else StandstillOut.model_validate(row.standstill),
            active_generation=row.active_generation,
            layout=generation.layout if generation else None,
            nodes=generation.nodes if generation else [],
            last_step=row.last_step,
            stop_steps=int(row.spec["stop"]["steps"]),
            lost_steps=row.lost_steps,
            created_at=row.created_at,
            state_changed_at=row.state_changed_at,
        )


class JobPace(BaseModel):
    """How fast a job goes. Null while it stands, and before its first step."""

    steps_per_s: float | None = Field(default=None, description="By the median of the last steps.")
    remaining_s: float | None = Field(default=None, description="To the last step at this pace.")

    @classmethod
    def of(cls, row: JobRow, steps_per_s: float | None) -> "JobPace":
        """From a job's row and its measured pace."""
        missing = max(0, int(row.spec["stop"]["steps"]) - row.last_step)
        return cls(steps_per_s=steps_per_s, remaining_s=missing / steps_per_s if steps_per_s else None)


class ResumeJob(BaseModel):
    """How a job that has ended goes on."""

    model_config = ConfigDict(strict=True, extra="forbid")

    steps: Annotated[int | None, Field(ge=1, le=2**40, description="Its new stop.steps; absent: as before.")] = None
    from_step: Annotated[
        int | None, Field(ge=0, le=2**40, description="The checkpoint to go on from; later ones are left behind.")
    ] = None


class CheckpointOut(BaseModel):
    """One complete checkpoint."""

    step: int
    generation: int
    path: str
    finished_at: datetime
    size_bytes: int | None
    seconds: float | None
    damage: str | None = Field(default=None, description="Why no start can load it; null: nothing is known of that.")
    left_behind: bool = Field(default=False, description="The job went back to an earlier step; no start uses it.")

    @classmethod
    def of(cls, row: CheckpointRow, job: JobRow) -> "CheckpointOut":
        """From its row and that of its job."""
        found = cls.model_validate(row, from_attributes=True)
        return found.model_copy(update={"left_behind": is_left_behind(row, job)})


class JobIncidentOut(BaseModel):
    """What went wrong with a job although nobody had announced it. While it is open, `times` counts how often, and what
    is said is of the last time."""

    incident_id: int
    kind: IncidentKind
    reason: str
    began_at: datetime
    last_at: datetime
    over_at: datetime | None = Field(description="Null: it still goes wrong.")
    times: int
    lost_steps: int
    generation: int | None
    step: int | None = Field(description="After which it happened, or of the checkpoint.")
    node_id: str | None
    rank: int | None

    @classmethod
    def of(cls, row: JobIncidentRow) -> "JobIncidentOut":
        """From its row."""
        return cls.model_validate(row, from_attributes=True)


class JobOut(JobSummary):
    """Everything about one job except its steps and logs."""

    spec: JobFile
    generations: list[GenerationOut]
    checkpoints: list[CheckpointOut]
    pace: JobPace
    step_seconds: dict[str, float] = Field(description="Median measured seconds per step, by layout.")
    standing_plans: list[dict[str, Any]] = Field(description="What the agents do at once if these nodes go.")
    layouts_by_count: list[dict[str, Any]]
    open_handoff: str | None = None
    checkpoint_asked: bool = Field(default=False, description="A checkpoint was asked for and is not written yet.")


class StepOut(BaseModel):
    """One step."""

    generation: int
    step: int
    seconds: float
    loss: float | None
    consumed_samples: int | None
    sample_digest: str | None
    tokens: int | None
    finished_at: datetime

    @classmethod
    def of(cls, row: JobStepRow) -> "StepOut":
        """From its row."""
        return cls.model_validate(row, from_attributes=True)


class LogOut(BaseModel):
    """A piece of one rank's output. Ask again with `after` = the last `log_id`."""

    log_id: int
    generation: int
    rank: int
    offset: int
    text: str

    @classmethod
    def of(cls, row: RankLogRow) -> "LogOut":
        """From its row."""
        return cls(log_id=row.log_id, generation=row.generation, rank=row.rank, offset=row.start_offset, text=row.text)


class JobEvent(BaseModel):
    """One event of a job's watch stream: the job as it is now, new steps, and its latest handoff."""

    job: JobSummary
    pace: JobPace
    steps: list[StepOut]
    handoff: dict[str, Any] | None
