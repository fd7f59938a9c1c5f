"""What of a job may change while it lives, and what it becomes."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from sqlalchemy.orm import Session

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile import JobFile
from agent.protocol.jobfile_check import JobFileError, check_job_file
from agent.protocol.values import WrittenUtc
from liver_core.handoff import Prefer
from liver_core.layout.limits import Identifier
from service.jobs.operations import touch
from service.jobs.tables import ENDED, JobRow, JobState
from service.jobs.view import Checkpoint
from service.planner.feasibility import rule_violations
from service.problems import conflict, field_problems, invalid

READ_AT_START = ("stop", "checkpoint")
"""What ranks read once, when they start: all of a world must have read the same."""
_FIXED = "cannot be changed: the state that the job has was made with it; submit another job"
_BY_FIELD = {
    **dict.fromkeys(("checkpoint.path", "checkpoint.keep"), "cannot be changed: checkpoints that exist lie by it"),
    **dict.fromkeys(("layouts", "policy", "pools"), "cannot be changed: standing plans follow it; submit another job"),
    **dict.fromkeys(("environment", "workdir"), "cannot be changed: processes that were started have it"),
}
_JSON: TypeAdapter[Any] = TypeAdapter(Any)


def _names_something(schema: dict[str, Any]) -> None:
    """What is not named stays: no default stands in the description, and something must be named."""
    schema["minProperties"] = 1
    for field in schema["properties"].values():
        field.pop("default", None)


class _Named(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=_names_something)

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("must name what is to be changed")
        return self


class NodesChange(_Named):
    """Bounds that are not named stay."""

    min: Annotated[int, Field(ge=1, le=10_000)] = 1
    max: Annotated[int, Field(ge=1, le=10_000)] = 1


class StopChange(_Named):
    """The new last step."""

    steps: int = Field(ge=1, le=2**40)


class CheckpointChange(_Named):
    """The new interval."""

    every_steps: int = Field(ge=1, le=10_000_000)


class JobChange(_Named):
    """What is to be changed of a job, at least one thing; the fields are those of the job file."""

    name: Identifier = "job"
    nodes: NodesChange = NodesChange.model_construct()
    stop: StopChange = StopChange(steps=1)
    checkpoint: CheckpointChange = CheckpointChange(every_steps=1)
    prefer: Prefer = Prefer.PAUSE
    hang_restart_s: Annotated[float, Field(ge=0, le=604_800)] | None = Field(
        default=None, description="0: never; null: the default."
    )
    hook_s_max: Annotated[float, Field(gt=0, le=604_800)] | None = Field(
        default=None, description="Null takes it away."
    )
    budget_usd: Annotated[float, Field(gt=0)] | None = Field(default=None, description="Null takes it away.")
    deadline: WrittenUtc | None = Field(default=None, description="Null takes it away.")


def check_change(content: object) -> JobChange:
    """The change that a body asks for. Raises JobFileError naming each field that may not be changed, and why."""
    if not isinstance(content, Mapping):
        raise JobFileError((FieldProblem(field="(whole)", rule="must be a mapping of fields, such as {name: new}"),))
    checkpoint = content.get("checkpoint")
    named = [*content, *(f"checkpoint.{name}" for name in (checkpoint if isinstance(checkpoint, Mapping) else ()))]
    fixed = (JobFile.model_fields.keys() - JobChange.model_fields.keys()) | _BY_FIELD.keys()
    problems = tuple(FieldProblem(field=name, rule=_BY_FIELD.get(name, _FIXED)) for name in named if name in fixed)
    if problems:
        raise JobFileError(problems)
    try:
        return JobChange.model_validate_json(_JSON.dump_json(content))
    except ValidationError as error:
        raise JobFileError(field_problems(error)) from None


def change_job(session: Session, job: JobRow, change: JobChange, newest: Checkpoint | None, *, now: datetime) -> None:
    """Change a job whose row is locked. Raises 409 where its state does not allow it, and 422 by field where the job
    file would not be right. `newest`: the checkpoint that it would continue from."""
    wanted = change.model_dump(mode="json", exclude_unset=True)
    if job.state in ENDED:
        raise conflict(f"job {job.job_id} has ended: it is {job.state}; to go on with more steps, resume it")
    read = [name for name in READ_AT_START if name in wanted]
    if read and job.state not in (JobState.PENDING, JobState.SUSPENDED):
        raise conflict(f"job {job.job_id} is {job.state}: its ranks have read {' and '.join(read)}; pause it first")
    if newest is not None and "stop" in wanted and wanted["stop"]["steps"] <= newest.step:
        raise conflict(f"job {job.job_id} has a checkpoint of step {newest.step}: stop.steps must be above it")
    try:
        job_file = check_job_file(_merged(job.spec, wanted))
    except JobFileError as error:
        raise invalid(*error.problems) from error
    if violations := rule_violations(job_file):
        raise invalid(*(FieldProblem(field=item.field, rule=item.rule) for item in violations))
    job.name, job.spec = job_file.name, job_file.model_dump(mode="json", exclude_none=True)
    touch(session, job, now=now)


def _merged(spec: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(spec)
    for name, value in wanted.items():
        merged[name] = {**spec.get(name, {}), **value} if isinstance(value, dict) else value
    return {name: value for name, value in merged.items() if value is not None}
