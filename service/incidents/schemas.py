"""What the REST API says of incidents, and of the phases of a handoff in time."""

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, Field

from agent.protocol.notice_life import NoticePhase
from agent.protocol.sync import NoticeKind
from service.decisions.endpoints import DecisionOut
from service.handoffs.schemas import HandoffOut
from service.incidents.rules import IncidentOutcome, Picture
from service.jobs.schemas import GenerationOut
from service.leases.endpoints import LeaseOut
from service.notices.endpoints import ChannelOut


class BarOut(BaseModel):
    """One phase."""

    name: str
    label: str
    group: str = Field(description="decide, prepare, ranks, cutover, pause or after.")
    starts_s: float = Field(description="After from_at.")
    seconds: float
    critical: bool = Field(description="On the critical path: the whole is no shorter without it.")


class WaterfallOut(BaseModel):
    """The phases of a handoff in time, from the notice that it answers, or else from its opening."""

    handoff_id: UUID
    incident_id: int | None = Field(description="The notice that it answers.")
    from_at: datetime
    total_s: float
    bars: list[BarOut]
    critical_path: list[str] = Field(description="Names of bars, in order.")

    @classmethod
    def of(cls, handoff_id: UUID, incident_id: int | None, found: Picture) -> "WaterfallOut":
        """From the picture."""
        return cls(
            handoff_id=handoff_id,
            incident_id=incident_id,
            from_at=found.from_at,
            total_s=found.total_s,
            bars=[BarOut.model_validate(bar, from_attributes=True) for bar in found.bars],
            critical_path=list(found.critical_path),
        )


class IncidentSummary(BaseModel):
    """One notice and what became of it."""

    incident_id: int = Field(description="The number of the notice.")
    node_id: str
    pool: str
    kind: NoticeKind
    source: str = Field(description="The channel that was first.")
    drained: bool = Field(description="A person asked for it.")
    first_seen_at: datetime
    deadline_at: datetime | None
    withdrawn_at: datetime | None
    open: bool
    state: NoticePhase
    jobs: list[str] = Field(description="That the node worked for when it came.")
    handoff_ids: list[UUID]
    outcome: IncidentOutcome
    outcome_reason: str
    pause_s: float | None = Field(description="Of the handoffs that answered it; null while none has happened.")
    lost_steps: int = Field(description="That were made again after a restart.")
    dollars: float | None = Field(description="Of pauses, restarts and what was moved; null where a price is missing.")
    bytes_moved: int | None
    notice_to_safe_s: float | None = Field(description="Until the node could have died with nothing lost.")


class IncidentCosts(BaseModel):
    """Dollars by kind; null where a price is missing."""

    pause: float | None
    recompute: float
    lost: float
    fallback_restart: float
    egress: float | None


class IncidentHandoff(BaseModel):
    """A handoff that answered the notice, with its phases in time."""

    handoff: HandoffOut
    waterfall: WaterfallOut


class IncidentOut(IncidentSummary):
    """One notice with everything that followed from it."""

    lease: LeaseOut
    channels: list[ChannelOut] = Field(description="Who said so, the first one first, with what it said.")
    decisions: list[DecisionOut] = Field(description="About its jobs meanwhile, oldest first.")
    handoffs: list[IncidentHandoff]
    restarts: list[GenerationOut]
    costs: IncidentCosts
