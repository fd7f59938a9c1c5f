"""The two messages of a handoff: `Order` (proposer to participant) and `Report` (participant to proposer).

Pure. Both are level-triggered: an Order says the whole wanted state of one participant, a Report the whole true state.
Either may be lost, repeated, delayed and reordered; nothing is ever inferred from a message that did not come.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NewType

from liver_core.handoff.fields import GENERATION_MAX, RANKS_MAX, Fields, MessageError
from liver_core.layout import LayoutError, Member, Roster

PROTOCOL_VERSION = 1

HandoffId = NewType("HandoffId", str)
"""A UUID made by the proposer."""


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


@dataclass(frozen=True, slots=True)
class Reason:
    """Why: which rank, in which phase, at which tile, and a sentence. `rank` is None when no one is to blame."""

    text: str
    phase: str
    rank: int | None = None
    tile: str = ""

    def __str__(self) -> str:
        where = f"rank {self.rank}, {self.phase}" if self.rank is not None else self.phase
        return f"{where}{f', tile {self.tile}' if self.tile else ''}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "phase": self.phase, "tile": self.tile, "text": self.text}

    @classmethod
    def from_json(cls, data: object, path: str = "reason") -> "Reason":
        fields = Fields(data, path)
        rank = None if fields.value("rank") is None else fields.integer("rank", most=RANKS_MAX - 1)
        reason = cls(
            text=fields.text("text"), phase=fields.text("phase"), rank=rank, tile=fields.text("tile", empty=True)
        )
        fields.finish()
        return reason


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store of the target generation listens. A store that died is never started again for its generation:
    an empty record in the place of a decided one would allow a second decision."""

    host: str
    port: int

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host, "port": self.port}

    @classmethod
    def from_json(cls, data: object, path: str = "store") -> "StoreAddress":
        fields = Fields(data, path)
        store = cls(host=fields.text("host"), port=fields.integer("port", least=1, most=65_535))
        fields.finish()
        return store


@dataclass(frozen=True, slots=True)
class CutoverDeadlines:
    """Seconds after the agreed boundary: when a target, then a source, may propose NO-GO, and when whoever cannot read
    the decision falls to the checkpoint rung. Sources wait longer, so that a target's own judgement comes first.

    `build_s`, on the rescue rung: seconds from the decision until the target world must stand. It is no part of the
    handoff's deadline, which is when leavers are gone: they are needed no more by then.
    """

    target_s: float = 20.0
    source_s: float = 30.0
    store_s: float = 60.0
    build_s: float = 120.0

    def over_s(self, rung: "Rung") -> float:
        """Seconds after the boundary by which every rank that lives stands in a world, or has fallen."""
        return self.store_s + self.newcomer_s(rung)

    def newcomer_s(self, rung: "Rung") -> float:
        """Seconds after the handoff's deadline for which a newcomer may still come: a rescue needs it only when the
        leavers are gone, for as long as the target world is built."""
        return self.build_s if rung is Rung.RESCUE else 0.0

    def __post_init__(self) -> None:
        if not self.build_s > 0:
            raise MessageError("cutover", f"needs build_s > 0, got {self.build_s}")
        if not 0 < self.target_s < self.source_s < self.store_s:
            raise MessageError(
                "cutover",
                f"needs 0 < target_s < source_s < store_s, got {self.target_s}, {self.source_s}, {self.store_s}",
            )

    def to_json(self) -> dict[str, Any]:
        names = ("target_s", "source_s", "store_s", "build_s")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, data: object, path: str = "cutover") -> "CutoverDeadlines":
        fields = Fields(data, path)
        names = ("target_s", "source_s", "store_s", "build_s")
        deadlines = cls(*(fields.seconds(name) for name in names))
        fields.finish()
        return deadlines


@dataclass(frozen=True, slots=True)
class Promise:
    """What a participant has bound itself to, and the furthest phase that it has accepted."""

    handoff_id: HandoffId
    generation: int
    plan_revision: int
    phase: Phase

    def to_json(self) -> dict[str, Any]:
        return {
            "handoff_id": self.handoff_id,
            "generation": self.generation,
            "plan_revision": self.plan_revision,
            "phase": str(self.phase),
        }

    @classmethod
    def from_json(cls, data: object, path: str = "promise") -> "Promise":
        fields = Fields(data, path)
        promise = cls(
            handoff_id=HandoffId(fields.text("handoff_id", chars_max=64)),
            generation=fields.integer("generation", least=1, most=GENERATION_MAX),
            plan_revision=fields.integer("plan_revision", least=1),
            phase=fields.choice("phase", Phase),
        )
        fields.finish()
        return promise


@dataclass(frozen=True, slots=True)
class WorldStage:
    """The stage of a participant's rank in one world: `rank` is its index in that generation's roster."""

    generation: int
    rank: int
    stage: Stage

    def to_json(self) -> dict[str, Any]:
        return {"generation": self.generation, "rank": self.rank, "stage": str(self.stage)}

    @classmethod
    def from_json(cls, data: object, path: str = "stages") -> "WorldStage":
        fields = Fields(data, path)
        stage = cls(
            generation=fields.integer("generation", least=1, most=GENERATION_MAX),
            rank=fields.integer("rank", most=RANKS_MAX - 1),
            stage=fields.choice("stage", Stage),
        )
        fields.finish()
        return stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The whole wanted state of one participant.

    `source` is the roster of the parent generation, None only when the job has no world yet. On the checkpoint rung the
    source is given up, not read: its members end their ranks, so that two worlds can never step side by side, and every
    target loads `checkpoint` (empty: the job starts from its first step), pinned here so that all load the same.
    `target_revision` is the plan revision in which target and rung became what they are: while it stays, a newer
    revision only brings the deadline nearer, and a rank keeps what it has built and received. `deadline_utc` and
    `issued_at` are seconds since 1970, UTC; after `deadline_utc` a participant that has not reached the boundary aborts
    by itself.
    """

    job_id: str
    handoff_id: HandoffId
    parent: int
    generation: int
    plan_revision: int
    plan_digest: str
    phase: Phase
    source: Roster | None
    target: Roster
    target_revision: int
    store: StoreAddress
    cause: str
    rung: Rung
    deadline_utc: float
    cutover: CutoverDeadlines
    proposer_id: str
    agent_incarnation: int
    report_seq: int
    issued_at: float
    reason: Reason | None = None
    checkpoint: str = ""
    protocol_version: int = PROTOCOL_VERSION

    @property
    def takes_over(self) -> bool:
        """Whether the target world reads its state from a living source world."""
        return self.source is not None and self.rung is not Rung.CHECKPOINT

    def boundary_by(self, member: Member) -> float:
        """When `member` must be past the boundary: at the deadline, but for a newcomer to a rescue."""
        newcomer = self.source is not None and member not in self.source.members
        return self.deadline_utc + (self.cutover.newcomer_s(self.rung) if newcomer else 0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            **_header_to_json(self),
            "phase": str(self.phase),
            "source": None if self.source is None else self.source.to_json(),
            "target": self.target.to_json(),
            "target_revision": self.target_revision,
            "store": self.store.to_json(),
            "cause": self.cause,
            "rung": str(self.rung),
            "cutover": self.cutover.to_json(),
            "proposer_id": self.proposer_id,
            "checkpoint": self.checkpoint,
        }

    @classmethod
    def from_json(cls, data: object) -> "Order":
        """Raises MessageError naming field and rule."""
        fields = Fields(data)
        header = _header_from_json(fields, generation_least=1)
        order = cls(
            **header,
            phase=fields.choice("phase", Phase),
            source=fields.optional("source", _roster_from_json),
            target=_roster_from_json(fields.value("target"), "target"),
            target_revision=fields.integer("target_revision", least=1),
            store=StoreAddress.from_json(fields.value("store")),
            cause=fields.text("cause"),
            rung=fields.choice("rung", Rung),
            cutover=CutoverDeadlines.from_json(fields.value("cutover")),
            proposer_id=fields.text("proposer_id"),
            checkpoint=fields.text("checkpoint", empty=True),
        )
        fields.finish()
        _check_order(order)
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole truth about one participant, as the answer to an Order of `handoff_id` or unasked.

    `stage` is where the participant is in `handoff_id`; `stages` its ranks in every world it has a part in. A refusal
    is `stage == aborted` with a reason, while `promise` names the handoff that the participant is bound to. Reports of
    one participant are ordered by (`agent_incarnation`, `report_seq`).
    """

    job_id: str
    handoff_id: HandoffId
    parent: int
    generation: int
    plan_revision: int
    plan_digest: str
    member: Member
    stage: Stage
    stages: tuple[WorldStage, ...]
    promise: Promise | None
    active_generation: int
    highest_generation: int
    decision: Decision
    deadline_utc: float
    agent_incarnation: int
    report_seq: int
    issued_at: float
    reason: Reason | None = None
    protocol_version: int = PROTOCOL_VERSION

    @property
    def order_key(self) -> tuple[int, int]:
        """Newer reports of the same participant have a greater key."""
        return (self.agent_incarnation, self.report_seq)

    def to_json(self) -> dict[str, Any]:
        return {
            **_header_to_json(self),
            "member": self.member.to_json(),
            "stage": str(self.stage),
            "stages": [stage.to_json() for stage in self.stages],
            "promise": None if self.promise is None else self.promise.to_json(),
            "active_generation": self.active_generation,
            "highest_generation": self.highest_generation,
            "decision": str(self.decision),
        }

    @classmethod
    def from_json(cls, data: object) -> "Report":
        """Raises MessageError naming field and rule."""
        fields = Fields(data)
        header = _header_from_json(fields, generation_least=0)
        report = cls(
            **header,
            member=_member_from_json(fields.value("member"), "member"),
            stage=fields.choice("stage", Stage),
            stages=fields.items("stages", WorldStage.from_json, most=4),
            promise=fields.optional("promise", Promise.from_json),
            active_generation=fields.integer("active_generation", most=GENERATION_MAX),
            highest_generation=fields.integer("highest_generation", most=GENERATION_MAX),
            decision=fields.choice("decision", Decision),
        )
        fields.finish()
        return report


def _roster_from_json(data: object, path: str) -> Roster:
    try:
        return Roster.from_json(data, path)
    except LayoutError as error:
        raise MessageError(error.field, error.rule) from error


def _member_from_json(data: object, path: str) -> Member:
    try:
        return Member.from_json(data, path)
    except LayoutError as error:
        raise MessageError(error.field, error.rule) from error


def _check_order(order: Order) -> None:
    """What the fields of an Order must hold together."""
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


def _header_to_json(message: Order | Report) -> dict[str, Any]:
    return {
        "protocol_version": message.protocol_version,
        "agent_incarnation": message.agent_incarnation,
        "report_seq": message.report_seq,
        "job_id": message.job_id,
        "handoff_id": message.handoff_id,
        "parent": message.parent,
        "generation": message.generation,
        "plan_revision": message.plan_revision,
        "plan_digest": message.plan_digest,
        "reason": None if message.reason is None else message.reason.to_json(),
        "deadline_utc": message.deadline_utc,
        "issued_at": message.issued_at,
    }


def _header_from_json(fields: Fields, *, generation_least: int) -> dict[str, Any]:
    version = fields.integer("protocol_version")
    if version != PROTOCOL_VERSION:
        raise MessageError("protocol_version", f"must be {PROTOCOL_VERSION}, the sender speaks {version}")
    return {
        "protocol_version": version,
        "agent_incarnation": fields.integer("agent_incarnation"),
        "report_seq": fields.integer("report_seq"),
        "job_id": fields.text("job_id", chars_max=63),
        "handoff_id": HandoffId(fields.text("handoff_id", empty=generation_least == 0, chars_max=64)),
        "parent": fields.integer("parent", most=GENERATION_MAX),
        "generation": fields.integer("generation", least=generation_least, most=GENERATION_MAX),
        "plan_revision": fields.integer("plan_revision", least=generation_least),
        "plan_digest": fields.text("plan_digest", empty=True, chars_max=128),
        "reason": fields.optional("reason", Reason.from_json),
        "deadline_utc": fields.seconds("deadline_utc"),
        "issued_at": fields.seconds("issued_at"),
    }
