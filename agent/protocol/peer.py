"""The envelope agents of one job exchange over the peer endpoint: an Order of the lead, a Report of a participant.

Pure. Level-triggered: an Order says the whole wanted state, a Report the whole true state; both may be lost, repeated
and reordered. The header fields are those of handoff.md section 2. Authentication (the job's peer key) is around it.
"""

from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from agent.protocol.base import (
    NODES_MAX,
    PROTOCOL_VERSION,
    RANKS_MAX,
    Count,
    Digest,
    Generation,
    HandoffCause,
    HandoffDecision,
    JobId,
    Message,
    NodeId,
    Rank,
    RankStage,
    Reason,
    Roster,
    ShortText,
    StoreAddress,
    Utc,
)

PEER_PATH = "/peer/v1/messages"


class Want(StrEnum):
    """The whole state an order asks for."""

    PREPARE = "prepare"
    PERMIT = "permit"
    ABORT = "abort"
    RETIRE = "retire"


class RankProgress(Message):
    """One rank of one participant, as it stands."""

    rank: Rank
    world: Literal["source", "target"]
    stage: RankStage
    reason: Reason | None = None
    certificate: ShortText | None = None
    measures: dict[ShortText, float] = Field(default_factory=dict, max_length=128)


class PeerOrder(Message):
    """What the lead wants of the participant it is sent to."""

    kind: Literal["order"] = "order"
    want: Want
    cause: HandoffCause
    source: Roster
    target: Roster
    leaving: tuple[NodeId, ...] = Field(default=(), max_length=NODES_MAX)
    store: StoreAddress | None = None
    store_node: NodeId | None = None


class PeerReport(Message):
    """What one participant (a node) truly holds and has promised."""

    kind: Literal["report"] = "report"
    promised: UUID | None = Field(default=None, description="The one handoff this node's ranks of g are promised to.")
    ranks: tuple[RankProgress, ...] = Field(default=(), max_length=RANKS_MAX)
    store: StoreAddress | None = Field(default=None, description="Set by the node that was asked to host the store.")
    decision: HandoffDecision | None = None
    active_generation: Generation | None = None


class Envelope(Message):
    """One message between two agents of a job."""

    protocol_version: int = PROTOCOL_VERSION
    sender: NodeId
    agent_incarnation: UUID
    report_seq: Count
    job_id: JobId
    handoff_id: UUID
    parent: Generation
    generation: Generation
    plan_revision: int = Field(ge=1)
    plan_digest: Digest = ""
    reason: Reason | None = None
    deadline_utc: Utc | None = None
    issued_at: Utc
    body: Annotated[PeerOrder | PeerReport, Field(discriminator="kind")]
