"""The job file: what a user writes to register a job, and what agents get to run it.

Pure. Every error names the field and the rule it breaks; nothing is coerced except what YAML writes differently.
"""

import re
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from agent.protocol.job_part import JobPart
from agent.protocol.model_shape import ModelShape
from agent.protocol.values import Utc
from liver_core.handoff.rung_costs import Prefer
from liver_core.layout import ParallelLayout
from liver_core.layout.limits import Identifier

DEFAULT_ENTRYPOINT = "liver_core.training.gpt:GptJob"
ENTRYPOINT_PATTERN = r"^[A-Za-z_][\w]*(\.[A-Za-z_][\w]*)*:[A-Za-z_][\w]*$"
HIDDEN = "(hidden)"
"""In the place of a value that people must not see."""
WHOLE_PATH_PATTERN = r"^/[^\x00]+$"
ENVIRONMENT_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
LAYOUT_PATTERN = r"^(?:(?:TP|PP|DP|CP|EP|ETP|VPP)[1-9][0-9]{0,4})(?:x(?:TP|PP|DP|CP|EP|ETP|VPP)[1-9][0-9]{0,4})*$"


def _parses(text: str) -> str:
    ParallelLayout.parse(text)
    return text


def step_of(folder: str) -> int:
    """The step of a checkpoint, from the name of its folder."""
    return int(re.split("step-|iter_", folder.rstrip("/"))[-1])


def _number_as_text(value: object) -> object:
    """`OMP_NUM_THREADS: 1` is a number in YAML and text in an environment. What else is no text stays refused."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


LayoutText = Annotated[str, StringConstraints(pattern=LAYOUT_PATTERN, max_length=64), AfterValidator(_parses)]
START_PATTERN = r"^/(.*/)?(step-|iter_)[0-9]{1,18}/?$"
StartFolder = Annotated[str, StringConstraints(pattern=START_PATTERN, max_length=4_096)]
EnvironmentName = Annotated[str, StringConstraints(pattern=ENVIRONMENT_NAME, max_length=128)]
EnvironmentText = Annotated[
    str, BeforeValidator(_number_as_text), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}]})
]


TEXT_TAG, REFERENCE_TAG = "(text)", "(reference)"
"""Which of the two a value of `environment` is. No field of a job file can have such a name."""


def _text_or_reference(value: object) -> str:
    return REFERENCE_TAG if isinstance(value, dict | SecretReference) else TEXT_TAG


def looks_secret(name: str) -> bool:
    """Whether a variable of this name probably holds a secret: HF_TOKEN does, TOKENIZERS_PARALLELISM does not."""
    return any(part.endswith(("KEY", "TOKEN", "SECRET", "PASSWORD")) for part in name.upper().split("_"))


class SecretReference(JobPart):
    """Where the agent of each node finds the value of a variable: in a file there, or in its own environment."""

    from_file: Annotated[str, StringConstraints(pattern=WHOLE_PATH_PATTERN, max_length=4_096)] | None = None
    from_env: EnvironmentName | None = Field(default=None, validate_default=True)

    @field_validator("from_env")
    @classmethod
    def _one_place(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "from_file" in info.data and (value is None) == (info.data["from_file"] is None):
            raise ValueError("give either from_file or from_env")
        return value


EnvironmentValue = Annotated[
    Annotated[EnvironmentText, Tag(TEXT_TAG)] | Annotated[SecretReference, Tag(REFERENCE_TAG)],
    Discriminator(_text_or_reference),
]


class NodeBounds(JobPart):
    """Least and most nodes the job may run on."""

    min: int = Field(ge=1, le=10_000)
    max: int = Field(ge=1, le=10_000)

    @field_validator("max")
    @classmethod
    def _ordered(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min", value):
            raise ValueError(f"nodes.max {value} must be at least nodes.min {info.data['min']}")
        return value


class PinnedLayout(JobPart):
    """At this many nodes use this layout. Several for one count: each next time the count is reached, the next one."""

    nodes: int = Field(ge=1, le=10_000)
    layout: LayoutText


AxisSizes = Annotated[tuple[Annotated[int, Field(ge=1, le=10_000)], ...], Field(max_length=64)]


class LayoutLimits(JobPart):
    """An axis of which no sizes are given stays as it is in the layout in use."""

    expert_model_parallel: AxisSizes = ()
    expert_tensor_parallel: AxisSizes = ()


class LayoutRules(JobPart):
    """Which layouts may be used. All empty: every layout that divides the model is allowed."""

    allowed: tuple[LayoutText, ...] = Field(default=(), max_length=256)
    pinned: tuple[PinnedLayout, ...] = Field(default=(), max_length=256)
    prefer_change: bool = Field(
        default=False, description="With several pinned layouts for a count, take one not used at this count yet."
    )
    tensor_parallel_max: int | None = Field(default=None, ge=1, le=1_024)
    limits: LayoutLimits = Field(
        default_factory=LayoutLimits, description="Sizes that may be chosen where no layouts are named."
    )


class DdpRules(JobPart):
    """How gradients and weights travel between data-parallel ranks, as Megatron's DistributedDataParallel names it."""

    grad_reduce_in_fp32: bool = Field(
        default=True, description="Without it gradients are reduced, and handed over, in the dtype of their weights."
    )
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = Field(
        default=None, ge=1, le=2**40, description="Elements at which a gradient bucket is full."
    )

    @field_validator("overlap_param_gather", "bucket_size")
    @classmethod
    def _needs_overlap(cls, value: bool | int | None, info: ValidationInfo) -> bool | int | None:
        if value and not info.data.get("overlap_grad_reduce"):
            raise ValueError(f"ddp.{info.field_name} needs ddp.overlap_grad_reduce; without it there is one bucket")
        return value

    def arguments(self) -> dict[str, Any]:
        """By the names that a job's class gets them under. Not every class knows of gradients that are not fp32."""
        dtypes = {} if self.grad_reduce_in_fp32 else {"grad_reduce_in_fp32": False}
        return dtypes | {
            "overlap_grad_reduce": self.overlap_grad_reduce,
            "overlap_param_gather": self.overlap_param_gather,
            "ddp_bucket_size": self.bucket_size,
        }


class DropStepRule(JobPart):
    """Where a step may be dropped when a notice leaves no time for its end. Counted on one data-parallel rank: in a
    layout where it has no more micro-batches than this, a step has no such place. The last part may be shorter."""

    every_micro_batches: int = Field(ge=1, le=1_000_000)

    def part_of_step(self, micro_batches: int) -> float | None:
        """The longest part of a step of so many micro-batches, as a share of it; None where it has one part only."""
        return None if self.every_micro_batches >= micro_batches else self.every_micro_batches / micro_batches


class CheckpointRule(JobPart):
    """Where checkpoints go and how often one is written in the background."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=4_096)]
    every_steps: int = Field(default=100, ge=1, le=10_000_000)
    keep: int = Field(default=2, ge=1, le=1_000)


class OnNonfinite(StrEnum):
    """What to do about a step whose loss or gradient norm is NaN or infinite."""

    STOP = "stop"
    CONTINUE = "continue"


class StopRule(JobPart):
    """When the job is done."""

    steps: int = Field(ge=1, le=2**40)


class OnePlace(StrEnum):
    """What the nodes of one world must have in common."""

    ZONE = "zone"
    POOL = "pool"


class PolicyRules(JobPart):
    """How the service weighs changes, and what it wants to have (docs/policy.md)."""

    gain_min: float = Field(
        default=0.03, ge=0, le=10, description="A job moves of itself only for what is better by this share."
    )
    usd_per_mtok: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="What a million tokens are worth; not given: by the prices of on-demand nodes.",
    )
    keep_tp: bool = Field(
        default=False, description="Only changes of PP and DP, so that what TP splits is summed in the same order."
    )
    spares_max: int = Field(default=4, ge=0, le=64, description="Nodes held beyond those used, at most.")
    on_demand: bool = Field(default=True, description="Whether on-demand nodes may be wanted.")
    patience_s: float = Field(
        default=0.0, ge=0, le=604_800, description="On-demand nodes serve so long before spot nodes take over."
    )
    start_s: float = Field(
        default=0.0, ge=0, le=86_400, description="From nothing, or from another place, to the first step."
    )
    acquire_s: float = Field(default=120.0, ge=0, le=86_400, description="From wanting a node to having it.")
    within: OnePlace | None = Field(
        default=None, description="A world never lies in two zones, or in two pools; not given: it may."
    )


EXAMPLE: dict[str, Any] = {
    "name": "gpt-small",
    "global_batch": 16,
    "micro_batch": 2,
    "nodes": {"min": 2, "max": 4},
    "layouts": {"allowed": ["TP2xPP2", "PP3", "TP2xDP2"]},
    "model": {
        "num_layers": 6,
        "hidden_size": 192,
        "num_attention_heads": 6,
        "padded_vocab_size": 264,
        "seq_length": 128,
    },
    "checkpoint": {"path": "/tmp/checkpoints", "every_steps": 50},
    "stop": {"steps": 500},
}


class JobFile(JobPart):
    """One job. Field for field what `job.yaml` holds."""

    model_config = ConfigDict(
        strict=False,
        extra="forbid",
        frozen=True,
        json_schema_extra={"examples": [EXAMPLE]},
    )

    name: Identifier
    entrypoint: Annotated[str, StringConstraints(pattern=ENTRYPOINT_PATTERN, max_length=256)] = DEFAULT_ENTRYPOINT
    model: ModelShape
    ddp: DdpRules | None = Field(default=None, description="The job gets these too, where they are given.")
    args: dict[str, Any] = Field(default_factory=dict, max_length=256, description="Further arguments of the job.")
    workdir: Annotated[str, StringConstraints(min_length=1, max_length=4_096)] | None = None
    environment: dict[EnvironmentName, EnvironmentValue] = Field(default_factory=dict, max_length=256)
    global_batch: int = Field(ge=1, le=1_000_000)
    micro_batch: int = Field(default=1, ge=1, le=1_000_000)
    seed: int = Field(default=1234, ge=0, lt=2**31)
    nodes: NodeBounds
    layouts: LayoutRules = Field(default_factory=LayoutRules)
    start_from: StartFolder | None = Field(
        default=None, description="A checkpoint that this job continues: step-N, or iter_N of Megatron's training."
    )
    checkpoint: CheckpointRule | None = None
    tensorboard: Annotated[str, StringConstraints(min_length=1, max_length=4_096)] | None = Field(
        default=None, description="A folder inside checkpoint.path for TensorBoard's event files; not given: none."
    )
    drop_step: DropStepRule | None = Field(
        default=None, description="Not given: a step is never dropped, and costs nothing more."
    )
    prefer: Prefer = Field(
        default=Prefer.PAUSE,
        description="Which handoff is chosen where several fit: the shortest pause, or what costs least in all.",
    )
    device_bytes: int | None = Field(
        default=None,
        ge=1,
        le=2**50,
        description="Memory of the smallest device. No layout is chosen that needs more by estimate; not given: any.",
    )
    extra_bytes_max: int | None = Field(
        default=None, ge=1, le=2**50, description="What a handoff may add to the device of a rank."
    )
    host_bytes_max: int | None = Field(
        default=None, ge=1, le=2**50, description="What of it may wait in host memory; not given: nothing."
    )
    stream_gbps_max: float | None = Field(
        default=None,
        ge=0.001,
        le=10_000,
        description="Gb/s of state that a node may send to other machines while it trains; not given: all it can.",
    )
    validate_every_steps: int | None = Field(
        default=None, ge=1, le=10_000_000, description="How often the job's `validate` is called; not given: never."
    )
    on_nonfinite: OnNonfinite = Field(
        default=OnNonfinite.STOP, description="stop: the job fails before a step with a loss or norm of NaN is applied."
    )
    hang_restart_s: float | None = Field(
        default=None,
        ge=0,
        le=604_800,
        description="Without a step for so long, though all nodes are heard, the job starts from its checkpoint again. "
        "0: never; not given: ten times the longest step, and at least 20 minutes.",
    )
    hook_s_max: float | None = Field(
        default=None,
        gt=0,
        le=604_800,
        description="The same for what runs between steps: on_step, validate, a checkpoint. Not given: no limit.",
    )
    stop: StopRule
    policy: PolicyRules | None = Field(default=None, description="How changes are weighed; not given: the defaults.")
    budget_usd: float | None = Field(default=None, gt=0)
    deadline: Utc | None = Field(default=None, description="When the job should be done, with time zone.")
    pools: tuple[Identifier, ...] = Field(default=(), max_length=64, description="Pools it may use; empty means all.")

    @field_validator("micro_batch")
    @classmethod
    def _batches_divide(cls, value: int, info: ValidationInfo) -> int:
        batch = info.data.get("global_batch", 0)
        if batch % value:
            raise ValueError(f"global_batch {batch} must be divisible by micro_batch {value}")
        return value

    @field_validator("tensorboard")
    @classmethod
    def _lies_inside_the_checkpoints(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or "checkpoint" not in info.data:
            return value
        rule: CheckpointRule | None = info.data["checkpoint"]
        if rule is None:
            raise ValueError("needs checkpoint.path: it must be a folder inside that one")
        if PurePosixPath(rule.path) not in PurePosixPath(value).parents or ".." in PurePosixPath(value).parts:
            raise ValueError(f"must be a folder inside checkpoint.path, {rule.path}, without '..', is {value}")
        return value

    @field_validator("drop_step")
    @classmethod
    def _steps_have_parts(cls, value: DropStepRule | None, info: ValidationInfo) -> DropStepRule | None:
        if value is None or not {"global_batch", "micro_batch", "layouts"} <= info.data.keys():
            return value
        rules: LayoutRules = info.data["layouts"]
        texts = (*rules.allowed, *(pinned.layout for pinned in rules.pinned))
        dp = min((ParallelLayout.parse(text).dp for text in texts), default=1)
        most = info.data["global_batch"] // (info.data["micro_batch"] * dp)
        if value.every_micro_batches >= most:
            raise ValueError(
                f"every_micro_batches {value.every_micro_batches} must be below {most}, the most micro-batches of a "
                "step that a data-parallel rank has in any layout"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _goes_on(cls, value: StopRule, info: ValidationInfo) -> StopRule:
        start_from = info.data.get("start_from")
        if start_from is not None and value.steps <= step_of(start_from):
            raise ValueError(f"steps {value.steps} must be above {step_of(start_from)}, the step of start_from")
        return value

    @field_validator("host_bytes_max")
    @classmethod
    def _needs_a_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("extra_bytes_max", 0) is None:
            raise ValueError("needs extra_bytes_max: without a limit on the device nothing waits in host memory")
        return value

    def micro_batches(self, layout: ParallelLayout) -> int:
        """Of one data-parallel rank in one step."""
        return self.global_batch // (self.micro_batch * layout.dp)

    def plain_secrets(self) -> tuple[str, ...]:
        """The variables whose names say that they are secrets, and whose values stand in the job file."""
        return tuple(name for name, value in self.environment.items() if isinstance(value, str) and looks_secret(name))

    def without_secrets(self) -> "JobFile":
        """As people may see it."""
        hidden = dict.fromkeys(self.plain_secrets(), HIDDEN)
        return self.model_copy(update={"environment": self.environment | hidden})

    def job_args(self) -> dict[str, Any]:
        """What the entrypoint's class is called with as `args`: the sections model and ddp, then `args` over them."""
        ddp = {} if self.ddp is None else self.ddp.arguments()
        return self.model.model_dump(mode="json", exclude_none=True) | ddp | self.args


def job_file_schema() -> dict[str, Any]:
    """JSON schema of the job file, for editors and the API description."""
    return JobFile.model_json_schema()


__all__ = [
    "DEFAULT_ENTRYPOINT",
    "EXAMPLE",
    "CheckpointRule",
    "DdpRules",
    "DropStepRule",
    "JobFile",
    "LayoutLimits",
    "LayoutRules",
    "ModelShape",
    "NodeBounds",
    "OnNonfinite",
    "OnePlace",
    "PinnedLayout",
    "PolicyRules",
    "SecretReference",
    "StopRule",
    "job_file_schema",
    "step_of",
]
