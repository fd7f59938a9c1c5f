"""`POST /agent/v1/sync`: what an agent tells the service (SyncReport) and what it is told (SyncOrders).

Level-triggered: a report says the whole true state of a node plus bounded batches of facts not yet acknowledged; orders
say the whole wanted state, or its digest where the agent has it. Either may be lost or repeated. An agent sends facts
again until they are acknowledged; the service applies each (agent_incarnation, report_seq) and each fact at most once.
"""

from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from pydantic import ConfigDict, Field

from agent.protocol.jobfile import JobFile
from agent.protocol.rank_status import RankStatus
from agent.protocol.sources import GenerationSource
from agent.protocol.values import Amount, HandoffCause, HandoffState, Message, MetricValues, Placement, Step, Url, Utc
from agent.protocol.wires import WireFact
from liver_core.handoff import (
    PROTOCOL_VERSION,
    CostParts,
    Decision,
    LaterCheckpoints,
    Reason,
    Rung,
    RungCost,
    StoreAddress,
)
from liver_core.layout import Member, ParallelLayout, Roster
from liver_core.layout.limits import (
    GENERATION_MAX,
    NODES_MAX,
    RANKS_MAX,
    SLOTS_MAX,
    Bound,
    Count,
    Digest,
    FilePath,
    Generation,
    Identifier,
    JobId,
    NodeId,
    Port,
    Rank,
    Revision,
    Seconds,
    ShortText,
    Text,
)

STEPS_PER_REPORT_MAX = 1_024
WIRES_PER_REPORT_MAX = 64
METRICS_PER_REPORT_MAX = 256
LOG_CHUNKS_PER_REPORT_MAX = 64
LOG_CHUNK_CHARS_MAX = 16_384
NOTICES_PER_REPORT_MAX = 64
HANDOFFS_PER_REPORT_MAX = 64
RANKS_PER_REPORT_MAX = 1_024
CHECKPOINTS_PER_REPORT_MAX = 64
PROBES_MAX = 64
REPORT_BYTES_MAX = 4 * 1024 * 1024
REFUSALS_MAX = 1_024
NEIGHBOURS_KNOWN_MAX = 64


class Provider(StrEnum):
    """Who the node is rented from."""

    AWS = "aws"
    GCP = "gcp"
    NONE = "none"


class NoticeKind(StrEnum):
    """What was announced. Only the first two take a node away; the others are advice."""

    INTERRUPTION = "interruption"
    MAINTENANCE = "maintenance"
    REBALANCE = "rebalance"


class NoticeFact(Message):
    """What is known of one notice: that a node will go, as heard by one source. `notice_life` says what it means.

    Node, kind, source, `event_id` and `first_seen_utc` name the notice; a nearer deadline or a withdrawal is a new fact
    about it. A machine may have several planned events at a time.
    """

    node_id: NodeId
    kind: NoticeKind
    source: ShortText = Field(description="Which source heard it, for example aws-imds.")
    deadline_utc: Utc | None = Field(description="When the node may vanish; null if the source did not say.")
    first_seen_utc: Utc
    raw: Text = Field(default="", description="The announcement as received, for people.")
    withdrawn_utc: Utc | None = Field(default=None, description="When its source announced nothing any more.")
    event_id: ShortText = Field(default="", description="What its source calls a planned event; empty for all else.")
    said_utc: Utc | None = Field(default=None, description="When its source said so of a planned event, if known.")


class SourceState(StrEnum):
    """Whether a notice source can be read."""

    STARTING = "starting"
    WATCHING = "watching"
    UNKNOWN = "unknown"


class SourceHealth(Message):
    """How a node's notice source is doing. While it is unknown, notices may be missed."""

    source: ShortText
    state: SourceState
    reason: Text = Field(default="", description="Why it is not watching; empty while it is.")
    since_utc: Utc = Field(description="Since when it has been in this state.")
    announces: tuple[NoticeKind, ...] = Field(default=(), max_length=8, description="What it announced when last read.")
    overdue: tuple[NoticeKind, ...] = Field(default=(), max_length=8, description="The same, for a time long past.")


class NodeInfo(Message):
    """Who the reporting node is. Replaces what the node said before."""

    node_id: NodeId
    provider: Provider
    pool: Identifier = "default"
    slots: int = Field(ge=1, le=SLOTS_MAX, description="Rank processes the node can run at a time.")
    peer_url: Url = Field(description="Where other agents of a job reach this agent.")
    private_address: ShortText = Field(description="Host name or address that ranks and stores of this node bind to.")
    device: ShortText = "cpu"
    job_user: ShortText | None = Field(default=None, description="The user of jobs' code; none: the agent's own.")
    notice_source: SourceHealth | None = Field(default=None, description="How the node learns that it will go.")
    provider_id: Identifier | None = Field(default=None, description="What its cloud calls the machine, if known.")
    zone: Identifier | None = Field(default=None, description="The zone that the machine is in, such as us-east-1b.")


class StepRow(Message):
    """One finished step. Loss, digest and tokens may be null on ranks that do not know them."""

    job_id: JobId
    generation: Generation
    step: Step
    seconds: Seconds
    finished_utc: Utc
    loss: float | None = None
    consumed_samples: Count | None = None
    sample_digest: Digest | None = None
    tokens: Count | None = None


class MetricsRow(Message):
    """The numbers of one step, built in and the job's own. A newer generation's replace those of an older one."""

    job_id: JobId
    generation: Generation
    step: Step
    at_utc: Utc
    values: MetricValues


class HandoffMeasures(Message):
    """What handoff.md section 7 asks to be measured; filled in as it becomes known."""

    phases_s: dict[ShortText, Seconds] = Field(default_factory=dict, max_length=64)
    pause_s: Seconds | None = None
    pause_steps: Seconds | None = None
    lost_s: float | None = None
    lost_parts: CostParts | None = None
    rung_costs: Annotated[tuple[RungCost, ...], Bound(max_length=8)] = ()
    notice_to_decided_s: Seconds | None = None
    notice_to_first_order_s: Seconds | None = None
    notice_to_safe_s: Seconds | None = None
    notice_to_active_s: Seconds | None = None
    bytes_planned: Count | None = None
    bytes_moved: Count | None = None
    bytes_reread: Count | None = None
    bytes_replayed: Count | None = None
    bytes_lower_bound: Count | None = None
    bandwidth_bytes_per_s: Amount | None = None
    extra_bytes_peak: Count | None = None
    extra_bytes_budget: Count | None = None
    certificate: ShortText | None = None
    cutover_step: Step | None = None
    extra: dict[ShortText, float] = Field(default_factory=dict, max_length=64)


class HandoffMirror(Message):
    """One handoff as its lead agent knows it; also how the service first hears of one opened without it.

    `mirror_seq` grows with every change the proposer makes, so that late copies cannot undo newer ones.
    """

    handoff_id: UUID
    job_id: JobId
    parent: Annotated[int, Bound(ge=0, le=GENERATION_MAX)] = Field(description="0 when nothing came before.")
    generation: Generation
    plan_revision: Revision = 1
    plan_digest: Digest = ""
    mirror_seq: Count = 0
    proposer: ShortText = Field(description="Node id of the agent that opened it, or 'service'.")
    cause: HandoffCause
    state: HandoffState
    stage: ShortText = ""
    rung: Rung = Rung.STOP_AND_COPY
    source: Roster | None = Field(default=None, description="Null: no live world is taken over.")
    target: Roster
    leaving: tuple[NodeId, ...] = Field(default=(), max_length=NODES_MAX)
    store: StoreAddress | None = None
    store_node: NodeId | None = None
    decision: Decision | None = None
    reason: Reason | None = None
    opened_utc: Utc
    deadline_utc: Utc | None = None
    changed_utc: Utc
    superseded: bool = Field(default=False, description="Aborted because newer notices need one plan for all of them.")
    measures: HandoffMeasures = Field(default_factory=HandoffMeasures)


class HandoffDeclined(Message):
    """A handoff that the service proposes and that the agent whose turn it is does not open, and why."""

    handoff_id: UUID
    job_id: JobId
    reason: Text


class LogChunk(Message):
    """A piece of one rank's output, placed by its character offset."""

    job_id: JobId
    generation: Generation
    rank: Rank
    offset: Count
    text: Annotated[str, Bound(max_length=LOG_CHUNK_CHARS_MAX)] = Field(description="As it was written, NUL included.")


class CheckpointFact(Message):
    """One checkpoint that is complete on disk, or that failed. `loaded`: the world of `generation` did not write it,
    but began from it, and had been given another one or none."""

    job_id: JobId
    generation: Generation
    step: Step
    path: FilePath
    finished_utc: Utc
    size_bytes: Count | None = None
    seconds: Seconds | None = None
    asked: Count = Field(default=0, description="Number of the request that it answers, 0 without one.")
    failure: Text = Field(default="", description="Why it was not written; empty where it is complete.")
    loaded: bool = False


class StoreHosted(Message):
    """A store child of the reporting agent that is listening now."""

    job_id: JobId
    generation: Generation
    host: ShortText
    port: Port


class JobFinished(Message):
    """The job met its stop condition (every rank said so) or cannot go on by its own fault."""

    job_id: JobId
    generation: Generation
    step: Step
    failed: Reason | None = None


class PeerKeyKept(Message):
    """The reporting agent keeps orders of the job with this key, also across its own restart."""

    job_id: JobId
    number: Count


LEASE_SHARE = 0.7
"""Of the time after which the service may start a job elsewhere: for so long after an answer ranks may step on. The
rest is for a step boundary that comes late."""


class NodeAnswers(Message):
    """A node that the orders name under `probe`: its machine has just accepted a connection from the reporting one."""

    job_id: JobId
    node_id: NodeId


def _with_version(schema: dict[str, Any]) -> None:
    # Left out it means the present one only where a report is made; the service takes it as another one.
    schema["properties"]["protocol_version"]["const"] = PROTOCOL_VERSION
    schema["required"].append("protocol_version")


ANSWERED_AGO_S_MAX = 86_400.0
"""What is older says nothing of a clock."""


class SyncReport(Message):
    """Everything a node says. `report_seq` starts at 1 for each incarnation and grows by one per new report.

    An element of a list that breaks a rule is refused by name (`Refusal`), and so is a wrong `notice_source`,
    `provider_id` or `zone`; the rest of the report is stored."""

    model_config = ConfigDict(json_schema_extra=_with_version)

    protocol_version: int = PROTOCOL_VERSION
    agent_version: ShortText
    agent_incarnation: UUID
    report_seq: Revision
    issued_utc: Utc
    node: NodeInfo
    notices: tuple[NoticeFact, ...] = Field(
        default=(), max_length=NOTICES_PER_REPORT_MAX, description="Its own, and what other nodes of its jobs told it."
    )
    ranks: tuple[RankStatus, ...] = Field(default=(), max_length=RANKS_PER_REPORT_MAX)
    steps: tuple[StepRow, ...] = Field(default=(), max_length=STEPS_PER_REPORT_MAX)
    handoffs: tuple[HandoffMirror, ...] = Field(default=(), max_length=HANDOFFS_PER_REPORT_MAX)
    declined: tuple[HandoffDeclined, ...] = Field(default=(), max_length=HANDOFFS_PER_REPORT_MAX)
    logs: tuple[LogChunk, ...] = Field(default=(), max_length=LOG_CHUNKS_PER_REPORT_MAX)
    checkpoints: tuple[CheckpointFact, ...] = Field(default=(), max_length=CHECKPOINTS_PER_REPORT_MAX)
    stores: tuple[StoreHosted, ...] = Field(default=(), max_length=RANKS_PER_REPORT_MAX)
    finished: tuple[JobFinished, ...] = Field(default=(), max_length=64)
    answering: tuple[NodeAnswers, ...] = Field(default=(), max_length=PROBES_MAX)
    metrics: tuple[MetricsRow, ...] = Field(default=(), max_length=METRICS_PER_REPORT_MAX)
    wires: tuple[WireFact, ...] = Field(default=(), max_length=WIRES_PER_REPORT_MAX, description="Newly measured.")
    peer_keys: tuple[PeerKeyKept, ...] = Field(
        default=(), max_length=1_000, description="Of jobs whose orders name a key before the current one."
    )
    orders_known: Digest = Field(default="", description="Digest of the orders that the agent has now; empty: none.")
    neighbours_known: tuple[Digest, ...] = Field(
        default=(), max_length=NEIGHBOURS_KNOWN_MAX, description="Of the rosters and peers in those orders."
    )
    answered_utc: Utc | None = Field(
        default=None, description="`issued_utc` of the last answer, by the service's clock; null without one."
    )
    answered_ago_s: float = Field(
        default=0.0, ge=0, le=ANSWERED_AGO_S_MAX, allow_inf_nan=False,
        description="For how long the agent has had that answer, by a clock that is never set.",
    )  # fmt: skip


class DesiredState(StrEnum):
    """What the service wants of a job on this node."""

    RUN = "run"
    STOP = "stop"
    SUSPENDED = "suspended"


class StandingPlan(Message):
    """What to do at once if exactly these nodes go. Never carries a generation: that is burned at opening."""

    parent: Generation
    leaving: tuple[NodeId, ...] = Field(min_length=1, max_length=NODES_MAX)
    target: Placement | None = Field(description="Null: nothing feasible is left, take the checkpoint rung.")
    plan_digest: Digest = Field(description="Digest of the inputs the plan was made from.")
    reason: Text


class LayoutForCount(Message):
    """The layout the planner takes at one number of nodes."""

    nodes: int = Field(ge=1, le=NODES_MAX)
    layout: ParallelLayout | None = Field(description="Null: nothing feasible with this many nodes.")
    reason: Text


class LayoutByCount(Message):
    """Layouts for every node count from the job's least to its most: enough to plan any loss without the service."""

    choices: tuple[LayoutForCount, ...] = Field(default=(), max_length=4_096)


class HandoffOrder(Message):
    """A handoff the service proposes. The first agent of `lead_order` that is up opens it and burns a generation."""

    handoff_id: UUID
    parent: Generation
    cause: HandoffCause
    target: Placement
    leaving: tuple[NodeId, ...] = Field(default=(), max_length=NODES_MAX)
    plan_digest: Digest = ""
    proposed_utc: Utc
    deadline_utc: Utc | None = None
    reason: Text


PeerKey = Annotated[str, Bound(min_length=32, max_length=128)]
"""Secret of a job's peer endpoints."""


class JobOrder(Message):
    """The whole wanted state of one job, as far as this node needs to know it."""

    job_id: JobId
    spec: JobFile
    peer_key: PeerKey = Field(repr=False, description="Secret of the job's peer endpoints. Agents sign with it.")
    peer_key_before: PeerKey | None = Field(
        default=None, repr=False, description="The key before it, while some node may not have the current one: valid."
    )
    peer_key_number: Count = Field(default=1, description="Of the current key; grows by one with each.")
    desired: DesiredState
    suspends_utc: Utc | None = Field(
        default=None,
        description="From then on `desired` is suspended, whether or not the service can be heard: nothing fits what "
        "will be left. Null: no such time is planned.",
    )
    generation: Generation | None = Field(description="Active, or to be started; null before the first.")
    origin_id: UUID | None = Field(
        default=None, description="Names the generation's birth: same number but another origin means a stale world."
    )
    source: GenerationSource | None = None
    later: LaterCheckpoints | None = Field(default=None, description="What a start may take instead of `source`.")
    roster: Roster | None = None
    next_generation: Generation = Field(description="Lowest number the service has never seen used.")
    peers: dict[NodeId, Url] = Field(default_factory=dict, max_length=NODES_MAX)
    neighbours: Digest = Field(
        default="", description="Of roster and peers, which are left out where the report names it as known."
    )
    store_node: NodeId | None = None
    store: StoreAddress | None = None
    lead_order: tuple[NodeId, ...] = Field(default=(), max_length=NODES_MAX)
    standing_plans: tuple[StandingPlan, ...] = Field(default=(), max_length=NODES_MAX)
    layouts_by_count: LayoutByCount = Field(default_factory=LayoutByCount)
    spares: tuple[Member, ...] = Field(
        default=(), max_length=RANKS_MAX, description="Free slots that a plan made without the service may take."
    )
    handoff: HandoffOrder | None = None
    checkpoint_asked: Count = Field(default=0, description="Number of a request not answered yet, 0 without one.")
    saves_at_end: bool = Field(default=False, description="Ranks write a checkpoint before they end: give them time.")
    notices: tuple[NoticeFact, ...] = Field(
        default=(), max_length=NODES_MAX, description="Of the members, withdrawn or not, until each is over."
    )
    probe: tuple[NodeId, ...] = Field(
        default=(), max_length=PROBES_MAX, description="Nodes that the service does not hear: do their machines answer?"
    )
    lost_after_s: Seconds = Field(
        default=20.0, description="When no member is heard for so long, the job may be started elsewhere."
    )
    steps_from_utc: Utc | None = Field(
        default=None, description="Before, an older world may step on: ranks of this generation wait. Null: none can."
    )
    reason: Text = ""


class Refusal(Message):
    """A part of the report that was not taken, and why; the agent must not send it again. Of very many, some are left
    out."""

    part: ShortText = Field(description="Which list of the report, for example handoffs.")
    key: ShortText
    reason: Text


class SyncOrders(Message):
    """Everything a node is told. `orders_seq` grows whenever the orders of this node could have changed, but
    for changes in a large job that can wait."""

    protocol_version: int = PROTOCOL_VERSION
    orders_seq: Count
    issued_utc: Utc
    accepted_incarnation: UUID
    accepted_report_seq: Count = Field(description="Everything up to this report of this incarnation is stored.")
    orders_digest: Digest = Field(description="Of everything that `jobs` says.")
    unchanged: bool = Field(
        default=False, description="The agent has the orders with this digest, by its report: `jobs` is left out."
    )
    jobs: tuple[JobOrder, ...] = Field(default=(), max_length=1_000)
    refusals: tuple[Refusal, ...] = Field(default=(), max_length=REFUSALS_MAX)
    wake_path: ShortText = "/agent/v1/wake"
    poll_s: Seconds = Field(default=1.0, description="Time to the next sync when nothing wakes the agent.")
    progress_s: Seconds = Field(default=1.0, description="Least time between two syncs that only tell progress.")
