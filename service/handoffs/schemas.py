"""What the REST API returns about handoffs: who, from where to where, why, how long, how many bytes."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from agent.protocol.sync import HandoffMeasures
from agent.protocol.values import HandoffCause, HandoffState
from liver_core.handoff import CostParts, Decision, Rung, RungCost
from service.handoffs.tables import HandoffRow
from service.jobs.causes import FirstCause


class HandoffOut(BaseModel):
    """One attempt. Measures are null until they are known."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    handoff_id: UUID
    job_id: str
    parent: int
    generation: int | None = Field(description="Null while no agent has opened it.")
    plan_revision: int
    plan_digest: str
    proposer: str
    cause: HandoffCause
    state: HandoffState
    stage: str
    rung: Rung
    source_layout: Annotated[str, Field(alias="from", examples=["TP2xPP2xDP1"])]
    target_layout: Annotated[str, Field(alias="to", examples=["TP1xPP3xDP1"])]
    source_nodes: list[str]
    target_nodes: list[str]
    leaving: list[str]
    decision: Decision | None
    superseded: bool
    why: str = Field(description="What it is for: the decision's reason, or who will go.")
    reason: str = Field(description="What it waits for, or how it ended.")
    reason_detail: dict[str, Any] | None
    ended_by: FirstCause | None = Field(
        description="The first cause of an attempt that failed; final once an agent named it."
    )
    opened_at: datetime
    deadline_at: datetime | None
    changed_at: datetime
    phases_s: dict[str, float]
    pause_s: float | None
    pause_steps: float | None
    lost_s: float | None
    lost_parts: CostParts | None = Field(description="What lost_s consists of.")
    rung_costs: list[RungCost] = Field(
        description="What each rung was expected to cost in all when this one was chosen; to be compared with lost_s."
    )
    notice_to_decided_s: float | None
    notice_to_first_order_s: float | None
    notice_to_safe_s: float | None
    notice_to_active_s: float | None
    bytes_planned: int | None
    bytes_moved: int | None
    bytes_reread: int | None
    bytes_replayed: int | None
    bytes_lower_bound: int | None
    bandwidth_bytes_per_s: float | None
    extra_bytes_peak: int | None
    extra_bytes_budget: int | None
    certificate: str | None
    cutover_step: int | None
    extra: dict[str, float]

    @classmethod
    def of(cls, row: HandoffRow) -> "HandoffOut":
        """From its row."""
        measures = HandoffMeasures.model_validate(row.measures or {}, strict=False)
        return cls(
            handoff_id=UUID(str(row.handoff_id)),
            job_id=row.job_id,
            parent=row.parent,
            generation=row.generation,
            plan_revision=row.plan_revision,
            plan_digest=row.plan_digest,
            proposer=row.proposer,
            cause=HandoffCause(row.cause),
            state=HandoffState(row.state),
            stage=row.stage,
            rung=Rung(row.rung),
            source_layout=row.source_layout,
            target_layout=row.target_layout,
            source_nodes=_nodes(row.source),
            target_nodes=_nodes(row.target),
            leaving=row.leaving,
            decision=Decision(row.decision) if row.decision else None,
            superseded=row.superseded,
            why=row.why,
            reason=row.reason,
            reason_detail=row.reason_detail,
            ended_by=FirstCause.of(row.ended_by),
            opened_at=row.opened_at,
            deadline_at=row.deadline_at,
            changed_at=row.changed_at,
            **{name: getattr(measures, name) for name in HandoffMeasures.model_fields},
        )


def _nodes(roster: dict[str, Any] | None) -> list[str]:
    return list(dict.fromkeys(member["node_id"] for member in (roster or {}).get("members", ())))
