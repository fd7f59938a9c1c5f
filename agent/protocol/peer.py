"""The envelope that agents of one job exchange over the peer endpoint, around orders, reports and notices.

Pure. The envelope adds only who sends it and to whom. Authentication (the job's peer key) is around it.
"""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from agent.protocol.sync import NoticeFact
from agent.protocol.values import Message, Utc
from liver_core.handoff import PROTOCOL_VERSION, MessageError, Order, Report
from liver_core.layout.limits import Checked, JobId, NodeId, Seconds, ShortText, Slot

PEER_PATH = "/peer/v1/messages"
ENVELOPE_BYTES_MAX = 4 * 1024 * 1024


class RankMeasures(Message):
    """What one rank has measured so far in one handoff. Each says all of it, so the last one of a rank is the truth."""

    measures: dict[ShortText, float] = Field(default_factory=dict, max_length=128)
    certificate: ShortText | None = None


def _names_a_uuid(order: Order) -> Order:
    # What the service keeps of a handoff is kept under it.
    try:
        UUID(order.handoff_id)
    except ValueError:
        raise MessageError("handoff_id", f"must be a UUID, is {order.handoff_id!r}") from None
    return order


class OrderBody(Message):
    """An order of the agent that leads, for one slot of the receiver."""

    kind: Literal["order"] = "order"
    slot: Slot
    order: Annotated[Order, Checked(_names_a_uuid)]


class ReportBody(Message):
    """A participant's report, and beside it what its rank has measured: the proposer never looks at that."""

    kind: Literal["report"] = "report"
    report: Report
    measured: RankMeasures | None = None


class NoticeBody(Message):
    """A node will go: for the agent whose turn it is to lead. `step_s`: the usual seconds of a step where it runs, for
    one that has made none itself; 0 where it is not known."""

    kind: Literal["notice"] = "notice"
    notice: NoticeFact
    step_s: Seconds = 0.0


PeerBody = Annotated[OrderBody | ReportBody | NoticeBody, Field(discriminator="kind")]


class Envelope(Message):
    """One message between two agents of a job."""

    protocol_version: int = PROTOCOL_VERSION
    sender: NodeId
    receiver: NodeId
    agent_incarnation: UUID
    job_id: JobId
    issued_utc: Utc
    body: PeerBody
