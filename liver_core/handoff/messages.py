"""The two messages of a handoff: `Order` (proposer to participant) and `Report` (participant to proposer).

Pure. Both are level-triggered: an Order says the whole wanted state of one participant, a Report the whole true state.
Either may be lost, repeated, delayed and reordered; nothing is ever inferred from a message that did not come.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, NewType

from liver_core.layout import Member, MessageError, Roster
from liver_core.layout.limits import (
    GENERATION_MAX,
    LONG_S_MAX,
    NAME_CHARS_MAX,
    NO_NUL,
    STRICT,
    Bound,
    Checked,
    Count,
    Digest,
    ExitCode,
    FilePath,
    Generation,
    JobId,
    Name,
    Port,
    Rank,
    Revision,
    ShortText,
    Text,
    UtcSeconds,
    fitting,
)

PROTOCOL_VERSION = 5
"""Of all that agents, ranks and service say to each other. Nobody takes a field that he does not know, so that it is
raised with every change of fields or values, once between two releases."""

HandoffId = NewType("HandoffId", str)
"""A UUID made by the proposer."""


def _own_version(version: int) -> int:
    if version != PROTOCOL_VERSION:
        raise ValueError(f"must be {PROTOCOL_VERSION}, the sender speaks {version}")
    return version


HandoffName = Annotated[HandoffId, Bound(min_length=1, max_length=64), NO_NUL]
OwnVersion = Annotated[int, Checked(_own_version)]
AnyGeneration = Annotated[int, Bound(ge=0, le=GENERATION_MAX)]
"""A generation, or 0 where there is none."""
Positive = Annotated[float, Bound(gt=0.0, le=LONG_S_MAX)]
Explained = Annotated[Text, Bound(min_length=1)]
CheckpointPath = Annotated[str, Bound(max_length=4_096), NO_NUL]
"""Empty where there is none."""


class Phase(StrEnum):
    """What an Order wants, in the order in which a handoff goes through them; `abort` ends it from anywhere.

    `withdraw` takes permission back, so that a newer plan revision can be prepared; past the boundary it does nothing.
    """

    PREPARE = "prepare"
    PERMIT = "permit"
    WITHDRAW = "withdraw"
    RETIRE = "retire"
    ABORT = "abort"


class Stage(StrEnum):
    """Where one participant (or one of its ranks) truly is in a handoff."""

    IDLE = "idle"
    PREPARING = "preparing"
    STREAMING = "streaming"
    READY = "ready"
    CUTTING_OVER = "cutting_over"
    ACTIVE = "active"
    LEFT = "left"  # a leaver that has read GO: it holds nothing that anybody needs
    ABORTED = "aborted"
    BROKEN = "broken"


class RankStage(StrEnum):
    """What a rank process reports of itself."""

    STARTING = "starting"
    TRAINING = "training"  # steps in its world and has no part in any handoff
    PREPARING = "preparing"
    STREAMING = "streaming"  # live rung: built and connected; the state streams in and is not certified yet
    PREPARED = "prepared"  # built and connected, and certified where it streamed; no ready tag is set
    READY = "ready"  # the ready tag is set
    CUTTING_OVER = "cutting_over"  # the boundary was agreed: from here only the decision record rules
    ACTIVE = "active"  # GO, and the first step in the target world is done
    LEFT = "left"  # GO, and this rank has no part in the target world
    ABORTED = "aborted"  # whatever was prepared is gone; the source world trains on
    BROKEN = "broken"  # cannot go on in any world; only the checkpoint rung is left
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_of_handoff(self) -> bool:
        """Whether it says how far a handoff is; the others are about the world that the rank steps in."""
        return self not in (RankStage.STARTING, RankStage.TRAINING, RankStage.FINISHED, RankStage.FAILED)


class PreparePhase(StrEnum):
    """What a rank does between an order and `prepared`. Its reasons name the phase, and agents learn from that."""

    CONNECT = "connect"
    OFFER_STATE = "offer_state"
    GET_THE_MANIFEST = "get_the_manifest"
    ESTIMATE_MEMORY = "estimate_memory"  # refused here: there is no room for the next world
    BRING_UP_GROUPS = "bring_up_groups"
    BUILD_MODEL = "build_model"
    AGREE_ON_THE_MANIFEST = "agree_on_the_manifest"
    WARM_UP = "warm_up"
    LAY_OUT_STATE = "lay_out_state"
    OPEN_ENDPOINT = "open_endpoint"
    PLAN = "plan"
    CONNECT_TO_SOURCES = "connect_to_sources"
    LOAD_STATE = "load_state"
    STREAM = "stream"
    REPLAY = "replay"  # refused here: steps of this optimizer cannot be replayed
    PLAN_THE_RESCUE = "plan_the_rescue"  # refused here: there is no room for what leavers hold
    CONNECT_TO_LEAVERS = "connect_to_leavers"


class Decision(StrEnum):
    """The content of a handoff's decision record; once it is not `undecided` it never changes."""

    UNDECIDED = "undecided"
    GO = "go"
    GO_REDO = "go_redo"
    NO_GO = "no_go"

    @property
    def goes(self) -> bool:
        """Whether the target world is the one that trains on."""
        return self in (Decision.GO, Decision.GO_REDO)


class Rung(StrEnum):
    """The fallback ladder (handoff.md section 6), least disturbing first."""

    LIVE = "live"
    DROP_STEP = "drop_step"
    STOP_AND_COPY = "stop_and_copy"
    RESCUE = "rescue"
    CHECKPOINT = "checkpoint"
    SUSPEND = "suspend"

    @property
    def streams(self) -> bool:
        """Whether state is to stream while the source world trains."""
        return self in (Rung.LIVE, Rung.DROP_STEP)


class FailedPart(StrEnum):
    """What failed first. `checkpoint`: the one that a start began from cannot be loaded. `start`: a start made no step.
    `peer`: some rank failed, and only the others have reported it."""

    RANK = "rank"
    STORE = "store"
    NODE = "node"
    CHECKPOINT = "checkpoint"
    START = "start"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class FailureCause:
    """What failed, as far as the one that gives the reason knows. Nobody reads that in the reason's sentence.

    `signal` or `exit_code` where a process ended; `step`: the last one that it had made. `peer`: which rank of the
    present world another one could not read, where a rank is only missed. `newer_start`: the number of a newer
    start, of which this one's store of checkpoints tells. `checkpoint`: the path of the one that cannot be loaded."""

    what: FailedPart
    signal: ShortText | None = None
    exit_code: ExitCode | None = None
    step: Count | None = None
    peer: Rank | None = None
    newer_start: Generation | None = None
    checkpoint: FilePath | None = None


OUT_OF_TIME = "out of time"
"""The phase of the reason where a deadline passed and nobody had failed or was behind: the time was too short."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why: which rank, in which phase, at which tile, and a sentence. `rank` is None when no one is to blame. `node`:
    where that rank is, since two worlds have a rank of this number; empty where it is not known. `cause`: None where
    nothing has failed, and where it is the named rank, of whose process no end is known.

    A reason always fits its bounds: it often quotes an error, and one that is refused for its length explains nothing.
    """

    text: Explained
    phase: Name
    rank: Rank | None = None
    tile: ShortText = ""
    node: ShortText = ""
    cause: FailureCause | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", fitting(self.text) or "no reason given")
        object.__setattr__(self, "phase", fitting(self.phase, NAME_CHARS_MAX) or "unknown")
        object.__setattr__(self, "tile", fitting(self.tile, NAME_CHARS_MAX))
        object.__setattr__(self, "node", fitting(self.node, NAME_CHARS_MAX))

    def __str__(self) -> str:
        phase = self.phase.replace("_", " ")
        where = f"rank {self.rank}, {phase}" if self.rank is not None else phase
        return f"{where}{f', tile {self.tile}' if self.tile else ''}: {self.text}"

    def as_felt(self) -> "Reason":
        """As what the process of a rank ends with: of one that blames another, whose `node` it names, it only died."""
        return replace(self, cause=FailureCause(FailedPart.PEER)) if self.node else self


@dataclass(frozen=True, slots=True)
class Tick:
    """An event of all machines: time has passed. Due about once a second while Participant and Proposer want it,
    and at `next_deadline` of a Cutover."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store of the target generation listens. A store that died is never started again for its generation:
    an empty record in the place of a decided one would allow a second decision."""

    host: Name
    port: Port


@dataclass(frozen=True, slots=True)
class CutoverDeadlines:
    """Seconds after the agreed boundary: when a target, then a source, may propose NO-GO, and when whoever cannot read
    the decision falls to the checkpoint rung. Sources wait longer, so that a target's own judgement comes first.

    `build_s`, on the rescue rung: seconds from the decision until the target world must stand. It is no part of the
    handoff's deadline, which is when leavers are gone: they are needed no more by then.
    """

    target_s: Positive = 20.0
    source_s: Positive = 30.0
    store_s: Positive = 60.0
    build_s: Positive = 120.0

    def over_s(self, rung: "Rung") -> float:
        """Seconds after the boundary by which every rank that lives stands in a world, or has fallen."""
        return self.store_s + self.newcomer_s(rung)

    def newcomer_s(self, rung: "Rung") -> float:
        """Seconds after the handoff's deadline for which a newcomer may still come: a rescue needs it only when the
        leavers are gone, for as long as the target world is built."""
        return self.build_s if rung is Rung.RESCUE else 0.0

    def __post_init__(self) -> None:
        if not self.build_s > 0:
            raise MessageError("build_s", f"needs build_s > 0, got {self.build_s}")
        if not 0 < self.target_s < self.source_s < self.store_s:
            raise MessageError(
                "target_s",
                f"needs 0 < target_s < source_s < store_s, got {self.target_s}, {self.source_s}, {self.store_s}",
            )


@dataclass(frozen=True, slots=True)
class Promise:
    """What a participant has bound itself to, and the furthest phase that it has accepted."""

    handoff_id: HandoffName
    generation: Generation
    plan_revision: Revision
    phase: Phase


@dataclass(frozen=True, slots=True)
class WorldStage:
    """The stage of a participant's rank in one world: `rank` is its index in that generation's roster."""

    generation: Generation
    rank: Rank
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterCheckpoints:
    """The checkpoints that a start may take instead of the one that it is given: the job itself wrote them to `folder`,
    after a step above `above`, in a world of generation `since` or a newer one. Whoever ordered the start may not have
    heard of them."""

    __pydantic_config__ = STRICT

    folder: FilePath
    above: Count
    since: AnyGeneration = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The whole wanted state of one participant.

    `source` is the roster of the parent generation. A start of the service has none: every rank loads `checkpoint`
    (empty: the job starts from its first step), pinned here so that all load the same, or one of `later`, which rank 0
    chooses for all.
    `target_revision` is the plan revision in which target and rung became what they are: while it stays, a newer
    revision only brings the deadline nearer, and a rank keeps what it has built and received. `deadline_utc` and
    `issued_at` are seconds since 1970, UTC; after `deadline_utc` a participant that has not reached the boundary aborts
    by itself.
    """

    __pydantic_config__ = STRICT

    job_id: JobId
    handoff_id: HandoffName
    parent: AnyGeneration
    generation: Generation
    plan_revision: Revision
    plan_digest: Digest
    phase: Phase
    source: Roster | None
    target: Roster
    target_revision: Revision
    store: StoreAddress
    cause: Name
    rung: Rung
    deadline_utc: UtcSeconds
    cutover: CutoverDeadlines
    proposer_id: Name
    agent_incarnation: Count
    report_seq: Count
    issued_at: UtcSeconds
    reason: Reason | None = None
    checkpoint: CheckpointPath = ""
    later: LaterCheckpoints | None = None
    protocol_version: OwnVersion = PROTOCOL_VERSION

    @property
    def takes_over(self) -> bool:
        """Whether the target world reads its state from a living source world."""
        return self.source is not None and self.rung is not Rung.CHECKPOINT

    @property
    def streams(self) -> bool:
        """Whether state is to stream while the source world trains."""
        return self.source is not None and self.rung.streams

    @property
    def rescues(self) -> bool:
        """Whether leavers are released before the target world is built."""
        return self.source is not None and self.rung is Rung.RESCUE

    def names(self, member: Member) -> bool:
        """Whether `member` has a part in it."""
        return member in self.target.members or (self.source is not None and member in self.source.members)

    def rank_of(self, member: Member) -> int:
        """The rank that reasons name: of the target world where `member` has one there, else of the source, else 0."""
        rank = self.target.rank_of(member)
        if rank is None and self.source is not None:
            rank = self.source.rank_of(member)
        return rank or 0

    def boundary_by(self, member: Member) -> float:
        """When `member` must be past the boundary: at the deadline, but for a newcomer to a rescue."""
        newcomer = self.source is not None and member not in self.source.members
        return self.deadline_utc + (self.cutover.newcomer_s(self.rung) if newcomer else 0.0)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return Checked(_check_order).__get_pydantic_core_schema__(source, handler)


def start_order(
    target: Roster,
    store: StoreAddress,
    handoff_id: str,
    *,
    deadline_utc: float,
    issued_at: float,
    proposer_id: str,
    cause: str = "start",
    checkpoint: str = "",
    later: LaterCheckpoints | None = None,
) -> Order:
    """The order that makes a first world: nothing is taken over, `checkpoint` is loaded where there is one, or a newer
    one of `later`."""
    return Order(
        job_id=target.job_id,
        handoff_id=HandoffId(handoff_id),
        parent=0,
        generation=target.generation,
        plan_revision=1,
        plan_digest="",
        phase=Phase.PREPARE,
        source=None,
        target=target,
        target_revision=1,
        store=store,
        cause=cause,
        rung=Rung.CHECKPOINT,
        deadline_utc=deadline_utc,
        cutover=CutoverDeadlines(),
        proposer_id=proposer_id,
        agent_incarnation=0,
        report_seq=0,
        issued_at=issued_at,
        checkpoint=checkpoint,
        later=later,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole truth about one participant, as the answer to an Order of `handoff_id` or unasked.

    `stage` is where the participant is in `handoff_id`; `stages` its ranks in every world it has a part in. A refusal
    is `stage == aborted` with a reason, while `promise` names the handoff that the participant is bound to. Reports of
    one participant are ordered by (`agent_incarnation`, `report_seq`).
    """

    __pydantic_config__ = STRICT

    job_id: JobId
    handoff_id: HandoffName
    parent: AnyGeneration
    generation: AnyGeneration
    plan_revision: Count
    plan_digest: Digest
    member: Member
    stage: Stage
    stages: Annotated[tuple[WorldStage, ...], Bound(max_length=4)]
    promise: Promise | None
    active_generation: AnyGeneration
    highest_generation: AnyGeneration
    decision: Decision
    deadline_utc: UtcSeconds
    agent_incarnation: Count
    report_seq: Count
    issued_at: UtcSeconds
    reason: Reason | None = None
    protocol_version: OwnVersion = PROTOCOL_VERSION

    @property
    def order_key(self) -> tuple[int, int]:
        """Newer reports of the same participant have a greater key."""
        return (self.agent_incarnation, self.report_seq)


def _check_order(order: Order) -> Order:
    """What the fields of an order that was received must hold together."""
    if order.generation <= order.parent:
        raise MessageError("generation", f"must be above parent {order.parent}, is {order.generation}")
    if order.target_revision > order.plan_revision:
        raise MessageError("target_revision", f"must be at most {order.plan_revision}, is {order.target_revision}")
    if order.target.generation != order.generation:
        raise MessageError("target.generation", f"must be {order.generation}, is {order.target.generation}")
    if order.target.job_id != order.job_id:
        raise MessageError("target.job_id", f"must be {order.job_id}, is {order.target.job_id}")
    if order.source is not None and order.source.generation != order.parent:
        raise MessageError("source.generation", f"must be parent {order.parent}, is {order.source.generation}")
    if order.source is not None and order.source.job_id != order.job_id:
        raise MessageError("source.job_id", f"must be {order.job_id}, is {order.source.job_id}")
    if order.phase is Phase.ABORT and order.reason is None:
        raise MessageError("reason", "is required when phase is abort")
    return order
