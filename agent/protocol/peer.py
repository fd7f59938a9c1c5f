"""The envelope that agents of one job exchange over the peer endpoint, around orders, reports and notices.

Pure. The envelope adds only who sends it and to whom. Authentication (the job's peer key) is around it.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Literal, TypeVar
from uuid import UUID

from pydantic import Field

from agent.protocol.notice_life import moved
from agent.protocol.rank import PeerDied
from agent.protocol.sync import CheckpointFact, HandoffMirror, MetricsRow, NoticeFact, StepRow
from agent.protocol.values import Message, Utc
from agent.protocol.wires import WireOffer
from liver_core.handoff import PROTOCOL_VERSION, MessageError, Order, Report
from liver_core.handoff.messages import Explained
from liver_core.layout.limits import Checked, Generation, JobId, NodeId, Seconds, ShortText, Slot, Text

PEER_PATH = "/peer/v1/messages"
ENVELOPE_BYTES_MAX = 4 * 1024 * 1024
ROWS_PASSED_MAX, MIRRORS_PASSED_MAX = 500, 4
"""In one message: the roster of a large world is long, and a step may have many numbers."""
MessageT = TypeVar("MessageT", Order, Report)
FactT = TypeVar("FactT", HandoffMirror, CheckpointFact, StepRow, MetricsRow)


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


class DeathBody(Message):
    """A rank of the sender's node has died."""

    kind: Literal["death"] = "death"
    death: PeerDied


class FactsBody(Message):
    """What the sender knows and the service does not yet: the receiver tells it too, since the sender may be gone."""

    kind: Literal["facts"] = "facts"
    handoffs: tuple[HandoffMirror, ...] = Field(default=(), max_length=MIRRORS_PASSED_MAX)
    checkpoints: tuple[CheckpointFact, ...] = Field(default=(), max_length=ROWS_PASSED_MAX)
    steps: tuple[StepRow, ...] = Field(default=(), max_length=ROWS_PASSED_MAX)
    metrics: tuple[MetricsRow, ...] = Field(default=(), max_length=ROWS_PASSED_MAX)


class SuspensionBody(Message):
    """The agent that leads says when the ranks of this world are to end, since nothing fits without the nodes that go
    and the service is not heard. `at_utc` None: not any more. `goes`: the first of these nodes."""

    kind: Literal["suspension"] = "suspension"
    generation: Generation
    at_utc: Utc | None
    reason: Explained
    goes: NodeId


class WireAskedBody(Message):
    """The sender wants to measure how it reads the receiver."""

    kind: Literal["wire_asked"] = "wire_asked"
    check_id: UUID


class WireOfferedBody(Message):
    """The answer: what is to be read, or why there is nothing. `busy`: there may be in a minute."""

    kind: Literal["wire_offered"] = "wire_offered"
    check_id: UUID
    offer: WireOffer | None
    reason: Text = ""
    busy: bool = False


PeerBody = Annotated[
    OrderBody | ReportBody | NoticeBody | DeathBody | FactsBody | SuspensionBody | WireAskedBody | WireOfferedBody,
    Field(discriminator="kind"),
]


class Envelope(Message):
    """One message between two agents of a job."""

    protocol_version: int = PROTOCOL_VERSION
    sender: NodeId
    receiver: NodeId
    agent_incarnation: UUID
    job_id: JobId
    issued_utc: Utc
    body: PeerBody


def in_time_of(envelope: Envelope, ahead_s: float) -> Envelope:
    """The envelope with the times that it names by a clock that is ahead by so many seconds."""
    if not ahead_s:
        return envelope
    ahead = timedelta(seconds=ahead_s)
    match envelope.body:
        case OrderBody(order=order) as body:
            body = body.model_copy(update={"order": _moved(order, ahead_s)})
        case ReportBody(report=report, measured=measured) as body:
            if measured is not None:
                moments = {name: value + ahead_s * name.endswith("_utc") for name, value in measured.measures.items()}
                measured = measured.model_copy(update={"measures": moments})
            body = body.model_copy(update={"report": _moved(report, ahead_s), "measured": measured})
        case NoticeBody(notice=notice) as body:
            body = body.model_copy(update={"notice": moved(notice, ahead)})
        case (DeathBody() | WireAskedBody() | WireOfferedBody()) as body:
            pass  # They name no time.
        case SuspensionBody(at_utc=at) as body:
            body = body.model_copy(update={"at_utc": None if at is None else at + ahead})
        case FactsBody() as body:
            parts = ("handoffs", "checkpoints", "steps", "metrics")
            body = body.model_copy(
                update={part: tuple(_fact_moved(fact, ahead) for fact in getattr(body, part)) for part in parts}
            )
    return envelope.model_copy(update={"body": body, "issued_utc": envelope.issued_utc + ahead})


def _fact_moved(fact: FactT, ahead: timedelta) -> FactT:
    times = {name: value for name, value in fact if name.endswith("_utc") and value is not None}
    return fact.model_copy(update={name: value + ahead for name, value in times.items()})


def _moved(message: MessageT, by_s: float) -> MessageT:
    return replace(message, deadline_utc=message.deadline_utc + by_s, issued_at=message.issued_at + by_s)
