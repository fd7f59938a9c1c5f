"""What the stream of changes says. Each event is one of these as JSON, under the name with which it begins."""

from datetime import datetime

from pydantic import BaseModel, Field

from service.audit.endpoints import AuditOut
from service.fleet.schemas import PendingOut
from service.handoffs.schemas import HandoffOut
from service.jobs.schemas import StandstillOut, StepOut
from service.jobs.tables import JobState
from service.nodes.tables import NodeState


class JobBrief(BaseModel):
    """What changes of a job while it runs."""

    job_id: str
    name: str
    state: JobState
    reason: str
    warning: str
    paused: bool
    active_generation: int | None
    layout: str | None
    last_step: int
    stop_steps: int
    lost_steps: int
    last_step_at: datetime | None
    standstill: StandstillOut | None
    state_changed_at: datetime


class NodeBrief(BaseModel):
    """What changes of a node."""

    node_id: str
    pool: str
    state: NodeState
    leaving: bool


class HelloEvent(BaseModel):
    """`hello`: the first one of each connection."""

    at: datetime
    resumed: bool = Field(description="What was missed follows. If not: read anew what is shown.")


class BeatEvent(BaseModel):
    """`beat`: every few seconds, by the service's clock."""

    at: datetime


class JobsEvent(BaseModel):
    """`jobs`: those that have changed. `gone`: deleted."""

    jobs: list[JobBrief]
    gone: list[str]


class HandoffsEvent(BaseModel):
    """`handoffs`: those that have changed."""

    handoffs: list[HandoffOut]


class IncidentsEvent(BaseModel):
    """`incidents`: all nodes that are announced to go, once one of them changes."""

    pending: list[PendingOut]


class NodesEvent(BaseModel):
    """`nodes`: those that have changed. `gone`: whose lease has ended."""

    nodes: list[NodeBrief]
    gone: list[str]


class StepsEvent(BaseModel):
    """`steps`: new steps of a job that was asked for."""

    job_id: str
    steps: list[StepOut]


class AuditEvent(BaseModel):
    """`audit`: new rows."""

    rows: list[AuditOut]


EVENTS = (HelloEvent, BeatEvent, JobsEvent, HandoffsEvent, IncidentsEvent, NodesEvent, StepsEvent, AuditEvent)
