"""What the REST API says of the fleet."""

from datetime import datetime
from uuid import UUID

from pydantic import BaseModel, Field

from agent.protocol.notice_life import DRAIN, NoticePhase
from agent.protocol.sync import NoticeKind
from agent.protocol.values import HandoffState
from service.fleet.queries import HOURS, Pending, PoolNow


class FleetNodes(BaseModel):
    """How many nodes there are."""

    ready: int
    silent: int
    leaving: int
    idle: int = Field(description="That work for no job.")
    slots: int


class PoolOut(BaseModel):
    """One pool."""

    pool: str
    ready: int
    silent: int
    leaving: int
    busy: int = Field(description="Nodes that work for a job.")
    slots: int
    price_usd_per_hour: float | None = Field(description="Of one node.")
    on_demand_usd_per_hour: float | None
    price_since: datetime | None
    usd_per_hour: float = Field(description="Of its nodes now; 0 without a price.")
    since: datetime = Field(description="When the first of the hours below begins.")
    interruptions: list[int] = Field(description=f"Nodes announced to go in each of {HOURS} hours, the oldest first.")
    unannounced: list[int] = Field(description="Nodes that went without a notice, in the same hours.")

    @classmethod
    def of(cls, found: PoolNow, since: datetime) -> "PoolOut":
        """From what was read."""
        price = found.price
        per_hour = float(price.price_usd_per_hour) if price is not None else None
        on_demand = price.on_demand_usd_per_hour if price is not None else None
        return cls(
            pool=found.pool,
            ready=found.ready,
            silent=found.silent,
            leaving=found.leaving,
            busy=found.busy,
            slots=found.slots,
            price_usd_per_hour=per_hour,
            on_demand_usd_per_hour=None if on_demand is None else float(on_demand),
            price_since=price.effective_from if price is not None else None,
            usd_per_hour=(per_hour or 0.0) * found.nodes,
            since=since,
            interruptions=found.interruptions,
            unannounced=found.unannounced,
        )


class PendingOut(BaseModel):
    """A node that is announced to go."""

    incident_id: int
    node_id: str
    pool: str
    kind: NoticeKind
    source: str
    first_seen_at: datetime
    deadline_at: datetime | None
    state: NoticePhase
    drained: bool
    jobs: list[str]
    handoff_id: UUID | None
    handoff_state: HandoffState | None

    @classmethod
    def of(cls, found: Pending) -> "PendingOut":
        """From what was read."""
        first = found.rows[0]
        return cls(
            incident_id=found.number,
            node_id=first.node_id,
            pool=found.pool,
            kind=NoticeKind(first.kind),
            source=first.source,
            first_seen_at=first.first_seen_at,
            deadline_at=found.deadline_at,
            state=found.phase,
            drained=any(row.source == DRAIN for row in found.rows),
            jobs=list(found.jobs),
            handoff_id=UUID(str(found.handoff.handoff_id)) if found.handoff is not None else None,
            handoff_state=HandoffState(found.handoff.state) if found.handoff is not None else None,
        )


class FleetOut(BaseModel):
    """The fleet now."""

    at: datetime = Field(description="By the service's clock: countdowns go by it.")
    nodes: FleetNodes
    usd_per_hour: float = Field(description="Of all nodes whose pool has a price.")
    unpriced_nodes: int
    pools: list[PoolOut]
    pending: list[PendingOut] = Field(description="The nearest deadline first.")
