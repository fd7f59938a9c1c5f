"""What is asked and answered over the wire about a replay."""

import re
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from liver_core.layout.limits import Name, ShortText
from service.policy.types import PolicyKnobs, PolicyVerdict
from service.simulation.cluster_replay import POINTS_MAX
from service.simulation.traces import TraceFormat
from service.simulation.what_if import SETUP

TRACE_CHARS_MAX = 4 * 1024 * 1024
PRICES_CHARS_MAX = 1024 * 1024
JOB_FILE_CHARS_MAX = 1024 * 1024
USD_MAX = 1e9
OWN_PATTERN = r"^own-[1-9][0-9]{0,3}h$"
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TraceIn(BaseModel):
    """A capacity trace as text."""

    model_config = _STRICT

    name: Name = Field(default="trace", description="Under which the answer and errors name it.")
    format: TraceFormat = Field(
        default=TraceFormat.AUTO,
        strict=False,
        description="events: rows of ms,add|remove,node. event-lines: JSON lines [ms, add|remove, {nodes}]. "
        "dated-counts: date, time, nodes. step-curve: seconds, nodes. counts: a JSON list of Time and GPUs, or "
        "metadata.gap_seconds and data. auto: as its first line says.",
    )
    text: str = Field(max_length=TRACE_CHARS_MAX)


class WhatIfKnobs(BaseModel):
    """What a replay assumes. Everything may be left out."""

    model_config = _STRICT

    slots_per_node: int | None = Field(
        default=None, ge=1, le=64, description="GPUs of a node; absent: as the service's nodes have, else 1."
    )
    device: ShortText | None = Field(
        default=None, description="The GPU, for step times; absent: as the service's nodes have, else A100."
    )
    notice_s: float = Field(default=SETUP.notice_s, ge=0, le=3_600, description="How long before its end it is known.")
    unannounced_share: float = Field(
        default=SETUP.unannounced_share, ge=0, le=1, description="Share of the losses that nobody announces."
    )
    acquire_s: float | None = Field(
        default=None,
        ge=0,
        le=86_400,
        description="Until a node is back that was given back; absent: as the job's policy says, "
        f"else {SETUP.acquire_s:g} s.",
    )
    change_s: float | None = Field(
        default=None,
        ge=0,
        le=3_600,
        description="Training time that a change loses; absent: by the size of the job's state.",
    )
    usd_per_mtok: float | None = Field(
        default=None,
        gt=0,
        le=USD_MAX,
        description="What a million tokens is worth; absent: as the job file says, else by on-demand prices.",
    )
    spares_max: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description=f"Nodes held beyond those used; absent: as the job's policy says, else {PolicyKnobs().spares_max}.",
    )
    gain_min: float | None = Field(
        default=None,
        ge=0,
        le=10,
        description="By which share another choice must be worth more; absent: as the job's policy says, else 0.",
    )
    gang: int = Field(default=0, ge=0, le=10_000, description="Nodes without which the job does not run.")


class WhatIfAsk(BaseModel):
    """A job and a trace; each is given in one of two ways."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={
            "examples": [
                {
                    "job": "gpt-small-1a2b3c4d",
                    "trace": {"name": "two days", "text": "0,add,a\n0,add,b\n60000,remove,b\n"},
                    "knobs": {"notice_s": 30.0},
                }
            ]
        },
    )

    job: Name | None = Field(default=None, description="Id or name of a job of this service.")
    job_file: str | None = Field(default=None, max_length=JOB_FILE_CHARS_MAX, description="Or a job file, as text.")
    trace: TraceIn | None = None
    builtin: str | None = Field(
        default=None,
        max_length=16,
        json_schema_extra={"pattern": OWN_PATTERN},
        description="Or own-48h: the nodes that this service has had in the last 48 hours, or another number of them.",
    )
    prices: str | None = Field(
        default=None,
        max_length=PRICES_CHARS_MAX,
        description="CSV with pool (spot, on-demand), usd_per_hour and from_s or effective_from, of a node; may have "
        "egress_usd_per_gb, of 10^9 bytes that leave the pool. Absent: 1 and 3 USD per hour.",
    )
    machines: bool = Field(
        default=False,
        description="Whether the product's machines carry every change, so that a handoff can come too late or be "
        "refused. It takes ten times as long or more: a trace that is too long for it is refused.",
    )
    knobs: WhatIfKnobs = WhatIfKnobs()

    @field_validator("builtin")
    @classmethod
    def _names_hours(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(OWN_PATTERN, value):
            raise ValueError("must be own-48h, or another whole number of hours up to 9999")
        return value

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for one, other in (("job", "job_file"), ("trace", "builtin")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(f"exactly one of {one} and {other} must be given")
        return self


class TokensLost(BaseModel):
    """Tokens that the free ideal makes and this run does not, by cause; they sum to the difference."""

    not_held: float = Field(description="Nodes could be had, and it did not hold them.")
    layout: float = Field(description="Held nodes that its layout did not use, or not as well as the best one.")
    pause: float = Field(description="It changed its layout.")
    lost_work: float = Field(description="Steps that were made or begun, and had to be made again.")
    waiting: float = Field(description="It had nodes and did not run.")


class CurvePoint(BaseModel):
    """Where a run was at a moment."""

    at_s: float
    offered: int = Field(description="Nodes that could be had.")
    held: int = Field(description="Nodes that were paid for.")
    used: int = Field(description="Nodes that the job ran on.")
    tokens: float = Field(description="Made until then.")


class PolicyRunOut(BaseModel):
    """How it went under one policy."""

    policy: str = Field(description="liver, or what it is compared with.")
    goodput: float = Field(description="Tokens as a share of the free ideal, which changes at no cost.")
    tokens: float
    usd: float
    usd_per_mtok: float | None = Field(description="Null where it made no tokens.")
    changes: int
    tokens_lost_by: TokensLost
    node_hours_by_cause: dict[str, float]
    decisions: dict[PolicyVerdict, int] = Field(description="How many differed from the one before, by what they say.")
    curve: Annotated[list[CurvePoint], Field(max_length=POINTS_MAX)]


class OraclesOut(BaseModel):
    """What somebody could have made who knew the future; scored on the same times."""

    count_tokens: float = Field(description="Who knows how many nodes there will be.")
    victim_tokens: float = Field(description="Who knows also which nodes go.")
    regret_count: float = Field(description="By how much of it LiveR's policy made less.")
    regret_victim: float


class WhatIfOut(BaseModel):
    """A job on a trace, under LiveR's policy and what it is compared with."""

    job: str
    trace: str
    hours: float
    nodes_most: int = Field(description="The most nodes that could be had at a time.")
    slots_per_node: int
    device: str
    notice_s: float
    unannounced_share: float
    acquire_s: float
    lost_s: float = Field(description="Training time that a change was taken to cost.")
    lost_s_source: str = Field(description="Where that comes from.")
    lost_s_is_guess: bool = Field(description="The job's state is smaller or larger than any that was measured.")
    ideal_tokens: float
    oracles: OraclesOut
    tokens_vs_hold_all: float = Field(
        description="Of LiveR's policy, as a share of those of holding every node of use."
    )
    usd_vs_hold_all: float = Field(
        description="USD per token, by how much it is dearer than holding every node of use."
    )
    policies: list[PolicyRunOut] = Field(description="LiveR's first.")
    enacted: dict[str, int] | None = Field(
        description="How many handoffs and starts LiveR's policy had, by rung and end; null where nobody asked for "
        "machines."
    )
    handoffs_refused: int = Field(description="How often no handoff could be opened; 0 without machines.")
    gave_up: str = Field(description="Why the job ended before the trace, by the machines; empty if it did not.")
    not_followed: list[str] = Field(description="What the job file says of changes, and was not done.")
