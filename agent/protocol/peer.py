"""The envelope that agents of one job exchange over the peer endpoint, around `liver_core.handoff` Order and Report.

Pure. The handoff messages carry the header fields of handoff.md section 2 and check themselves (`Order.from_json`,
`Report.from_json`); this envelope adds only who sends it and to whom. Authentication (the job's peer key) is around it.
"""

from enum import StrEnum
from typing import Any
from uuid import UUID

from pydantic import Field

from agent.protocol.values import (
    PROTOCOL_VERSION,
    JobId,
    Message,
    NodeId,
    ShortText,
    Utc,
)

PEER_PATH = "/peer/v1/messages"
ENVELOPE_BYTES_MAX = 4 * 1024 * 1024


class PeerKind(StrEnum):
    """What is inside: a handoff message, or a `NoticeFact` for the agent that leads."""

    ORDER = "order"
    REPORT = "report"
    NOTICE = "notice"


class RankMeasures(Message):
    """What one rank has measured so far in one handoff. Each says all of it, so the last one of a rank is the truth."""

    measures: dict[ShortText, float] = Field(default_factory=dict, max_length=128)
    certificate: ShortText | None = None


class Envelope(Message):
    """One message between two agents of a job. `body` is the JSON form of the message that `kind` names.

    A report carries beside it what its rank has measured: the machine that takes the report never looks at that.
    """

    protocol_version: int = PROTOCOL_VERSION
    sender: NodeId
    receiver: NodeId
    agent_incarnation: UUID
    job_id: JobId
    issued_utc: Utc
    kind: PeerKind
    slot: int | None = Field(default=None, ge=0, lt=1_024, description="The receiver's slot that an order is for.")
    body: dict[str, Any]
    measured: RankMeasures | None = None
