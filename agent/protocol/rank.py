"""Messages between an agent and one rank process on its node: one JSON object a line over a unix socket.

Pure. `RankCommand` goes from the agent to the rank, `RankEvent` back; each carries its `type`.
"""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field, TypeAdapter

from agent.protocol.rank_status import Whereabouts
from agent.protocol.values import Amount, Message, MetricValues, Step
from liver_core.handoff import Decision, Order, RankStage, Reason
from liver_core.layout import Member
from liver_core.layout.limits import (
    COUNT_MAX,
    Bound,
    Count,
    Digest,
    FilePath,
    Generation,
    JobId,
    Rank,
    Revision,
    Seconds,
    ShortText,
    Text,
)

Pid = Annotated[int, Bound(ge=1, le=COUNT_MAX)]
LINE_BYTES_MAX = 4 * 1024 * 1024
LAST_SAID = "last said: "
"""Begins a line of a rank's log. The rest is a fact that its process ends with, for an agent that was not there."""


class Prepare(Message):
    """Build the world that `order` asks for beside the one that trains. Repeating it changes nothing; a newer plan
    revision takes the place of an older one."""

    type: Literal["prepare"] = "prepare"
    order: Order
    clock_zero: Amount = Field(description="UTC by the agent's clock at the zero of the machine's monotonic clock.")
    relay: ShortText | None = Field(default=None, description="Local name of this node's stream relay for the handoff.")


class Permit(Message):
    """Set the ready tag: the next boundary at which every rank of g holds it is the cutover."""

    type: Literal["permit"] = "permit"
    handoff_id: UUID
    plan_revision: Revision


class Withdraw(Message):
    """Take the ready tag back (possible until the boundary)."""

    type: Literal["withdraw"] = "withdraw"
    handoff_id: UUID


class Abort(Message):
    """Drop the world that is being prepared; g trains on."""

    type: Literal["abort"] = "abort"
    handoff_id: UUID
    reason: Reason


class Retire(Message):
    """Every rank of g+1 has reported its first step: free what g held."""

    type: Literal["retire"] = "retire"
    handoff_id: UUID


class WriteCheckpoint(Message):
    """Write a distributed checkpoint at the first boundary at which every rank has this number; numbers grow."""

    type: Literal["checkpoint"] = "checkpoint"
    number: Revision


class Stop(Message):
    """End after the current step, with a checkpoint if the job has a place for it."""

    type: Literal["stop"] = "stop"
    reason: Text


class StepLease(Message):
    """Until when this rank may apply steps unless another rank of its world holds a lease. A later one replaces it."""

    type: Literal["step_lease"] = "step_lease"
    until_s: Amount = Field(description="On the machine's monotonic clock, which all its processes share, in seconds.")


class PeerDied(Message):
    """The process of another rank of a world has ended: whatever still waits for it waits for nothing. Both worlds are
    named where it had a rank in two, a message each."""

    type: Literal["peer_died"] = "peer_died"
    generation: Generation = Field(description="Of the world that has lost a rank.")
    member: Member = Field(description="Which rank of it.")
    reason: Reason = Field(description="With its number in that world, its node, and how its process ended.")


class StatusQuery(Message):
    """Say `hello` and the true stage again (an agent that restarted asks this)."""

    type: Literal["status"] = "status"


class WhereQuery(Message):
    """Say where the main thread is. Asked of a rank that has said nothing for a while."""

    type: Literal["where"] = "where"


class Hello(Message):
    """The first line of every connection, and the answer to `status`."""

    type: Literal["hello"] = "hello"
    job_id: JobId
    generation: Generation
    rank: Rank
    pid: Pid
    start_time: Amount = Field(description="Start of the process as the kernel tells it; with the pid it is unique.")
    stage: RankStage
    step: Step = 0
    handoff_id: UUID | None = None


class StageReport(Message):
    """Where this rank stands in one handoff. Level-triggered: the last one is the truth."""

    type: Literal["stage"] = "stage"
    handoff_id: UUID
    generation: Generation
    rank: Rank
    stage: RankStage
    reason: Reason | None = Field(default=None, description="With prepared: why the rank fell to the next rung.")
    plan_revision: Revision | None = Field(default=None, description="Of the order that this stage belongs to.")
    decision: Decision = Field(default=Decision.UNDECIDED, description="What the decision record says, once read.")
    measures: dict[ShortText, float] = Field(default_factory=dict, max_length=128)
    certificate: ShortText | None = None


class StepReport(Message):
    """One finished step of this rank."""

    type: Literal["step"] = "step"
    generation: Generation
    step: Step
    seconds: Seconds
    loss: float | None = None
    consumed_samples: Count | None = None
    sample_digest: Digest | None = None
    tokens: Count | None = None


class WhereaboutsReport(Message):
    """The answer to `where`. It is no sign of progress."""

    type: Literal["whereabouts"] = "whereabouts"
    where: Whereabouts


class MetricsReport(Message):
    """The numbers of one step, built in and the job's own; said by one rank of the world, after the step's hooks."""

    type: Literal["metrics"] = "metrics"
    generation: Generation
    step: Step
    values: MetricValues


class Checkpointed(Message):
    """A checkpoint is complete on disk. The first rank of each of three nodes says so: an agent may hear nothing."""

    type: Literal["checkpointed"] = "checkpointed"
    path: FilePath
    step: Step
    seconds: Seconds | None = None
    size_bytes: Count | None = None
    asked: Count = Field(default=0, description="Number of the request that it answers, 0 without one.")
    generation: Generation | None = Field(default=None, description="The world that wrote it.")
    finished_utc: Amount | None = Field(default=None, description="By the agent's clock, in seconds since 1970.")
    loaded: bool = Field(default=False, description="That world began from it, and was not asked to.")


class CheckpointFailed(Message):
    """A checkpoint was not written, and training goes on without it. Said by the same ranks."""

    type: Literal["checkpoint_failed"] = "checkpoint_failed"
    path: FilePath
    step: Step
    reason: Text
    asked: Count = Field(default=0, description="Number of the request that it answers, 0 without one.")
    generation: Generation
    failed_utc: Amount = Field(description="By the agent's clock, in seconds since 1970.")


class Finished(Message):
    """The stop condition is met, or the job cannot go on by its own fault, and a restart would not help."""

    type: Literal["finished"] = "finished"
    step: Step
    failed: Reason | None = None


class Failed(Message):
    """The rank cannot go on and will exit."""

    type: Literal["failed"] = "failed"
    reason: Reason


RankCommand = Annotated[
    Prepare
    | Permit
    | Withdraw
    | Abort
    | Retire
    | WriteCheckpoint
    | Stop
    | StepLease
    | PeerDied
    | StatusQuery
    | WhereQuery,
    Field(discriminator="type"),
]
RankEvent = Annotated[
    Hello
    | StageReport
    | StepReport
    | Checkpointed
    | CheckpointFailed
    | Finished
    | Failed
    | MetricsReport
    | WhereaboutsReport,
    Field(discriminator="type"),
]
FACTS = (Checkpointed, CheckpointFailed, Finished, Failed)
"""What stays true once it was said, and must reach the service whichever agent hears it."""
_COMMANDS: TypeAdapter[RankCommand] = TypeAdapter(RankCommand)
_EVENTS: TypeAdapter[RankEvent] = TypeAdapter(RankEvent)


def encode_line(message: Message) -> bytes:
    """One message as one line, newline included."""
    return message.model_dump_json().encode() + b"\n"


def decode_command(line: bytes) -> RankCommand:
    """Raises pydantic.ValidationError (a ValueError) naming the field that is wrong."""
    return _COMMANDS.validate_json(line)


def decode_event(line: bytes) -> RankEvent:
    """Raises pydantic.ValidationError (a ValueError) naming the field that is wrong."""
    return _EVENTS.validate_json(line)
