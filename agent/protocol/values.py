"""What every message of the product has in common: strict types, bounds on every field, one protocol version.

Pure: pydantic only, no torch, no input or output. Agents, ranks and the service speak nothing else to each other.
"""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, model_validator

PROTOCOL_VERSION = 1
"""Raised when an old party could misread a new message; the service answers 409 to any other version."""

RANKS_MAX = 16_384
NODES_MAX = 10_000
REASON_CHARS_MAX = 2_000

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
URL_PATTERN = r"^https?://[^\s]+$"

Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER_PATTERN, min_length=1, max_length=63)]
NodeId = Identifier
JobId = Identifier
Text = Annotated[str, StringConstraints(max_length=REASON_CHARS_MAX)]
ShortText = Annotated[str, StringConstraints(max_length=256)]
Url = Annotated[str, StringConstraints(pattern=URL_PATTERN, max_length=512)]
Digest = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9:+/=_-]*$", max_length=128)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Rank = Annotated[int, Field(ge=0, lt=RANKS_MAX)]
Generation = Annotated[int, Field(ge=1, lt=2**31)]
Step = Annotated[int, Field(ge=0, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0)]
Utc = AwareDatetime


class Message(BaseModel):
    """Base of every message: unknown fields are refused, nothing is coerced, and a message never changes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Layout(Message):
    """The wire form of `liver_core.layout.ParallelLayout`, field for field."""

    tp: int = Field(default=1, ge=1, le=RANKS_MAX)
    pp: int = Field(default=1, ge=1, le=RANKS_MAX)
    dp: int = Field(default=1, ge=1, le=RANKS_MAX)
    cp: int = Field(default=1, ge=1, le=RANKS_MAX)
    ep: int = Field(default=1, ge=1, le=RANKS_MAX)
    etp: int = Field(default=1, ge=1, le=RANKS_MAX)
    vpp: int = Field(default=1, ge=1, le=1_024)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        rarer = (("CP", self.cp), ("EP", self.ep), ("ETP", self.etp), ("VPP", self.vpp))
        parts += [f"{axis}{size}" for axis, size in rarer if size > 1]
        return "x".join(parts)


class Member(Message):
    """One slot of one node; its position in `members` is the rank."""

    node_id: NodeId
    slot: int = Field(ge=0, lt=1_024)


class Placement(Message):
    """A layout and who holds each rank, not yet bound to a generation (standing plans and proposals)."""

    layout: Layout
    members: tuple[Member, ...] = Field(min_length=1, max_length=RANKS_MAX)

    @model_validator(mode="after")
    def _one_slot_for_each_rank(self) -> Self:
        if len(self.members) != self.layout.world_size:
            raise ValueError(
                f"members must be {self.layout.world_size} for layout {self.layout}, are {len(self.members)}"
            )
        if len(set(self.members)) != len(self.members):
            raise ValueError("members must name every slot at most once")
        return self

    def node_ids(self) -> tuple[str, ...]:
        """The nodes used, each once, in rank order."""
        return tuple(dict.fromkeys(member.node_id for member in self.members))


class Roster(Placement):
    """The wire form of `liver_core.layout.Roster`: a placement bound to a job and a generation."""

    job_id: JobId
    generation: Generation


class StoreAddress(Message):
    """Where the store of one generation listens (a private address of the node that hosts it)."""

    host: ShortText
    port: Port


class Reason(Message):
    """Why something was refused, aborted or chosen; names rank, phase and tile where one is to blame."""

    text: Text
    rank: Rank | None = None
    phase: ShortText | None = None
    tile: ShortText | None = None


class RankStage(StrEnum):
    """Where one rank process stands."""

    STARTING = "starting"
    TRAINING = "training"
    PREPARING = "preparing"
    STREAMING = "streaming"
    PREPARED = "prepared"
    READY = "ready"
    CUTTING_OVER = "cutting_over"
    ACTIVE = "active"
    LEFT = "left"
    ABORTED = "aborted"
    BROKEN = "broken"
    FINISHED = "finished"
    FAILED = "failed"


class HandoffState(StrEnum):
    """The state machine of one handoff; `aborted` is reached from the first three only, `broken` only after them."""

    PROPOSED = "proposed"
    PREPARING = "preparing"
    STREAMING = "streaming"
    READY = "ready"
    CUTTING_OVER = "cutting_over"
    ACTIVE = "active"
    ABORTED = "aborted"
    BROKEN = "broken"


class Rung(StrEnum):
    """The fallback ladder, from the least to the most disturbing."""

    LIVE = "live"
    DROP_STEP = "drop_step"
    STOP_AND_COPY = "stop_and_copy"
    RESCUE = "rescue"
    REPLICA = "replica"
    CHECKPOINT = "checkpoint"
    SUSPEND = "suspend"


class HandoffCause(StrEnum):
    """What made somebody propose a handoff; the last two have no live world to take over."""

    NOTICE = "notice"
    GROW = "grow"
    REQUEST = "request"
    REBALANCE = "rebalance"
    START = "start"
    CHECKPOINT = "checkpoint"


class HandoffDecision(StrEnum):
    """The content of a decision record in the store."""

    UNDECIDED = "undecided"
    GO = "go"
    GO_REDO = "go_redo"
    NO_GO = "no_go"
