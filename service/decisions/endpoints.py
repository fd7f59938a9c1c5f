"""REST of decisions: list those about a job, show the one that would be made now."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import select

from agent.protocol.errors import FieldProblem
from liver_core.layout.limits import JobId, NodeId
from service.context import PERSON_ONLY, ContextOf, SessionOf
from service.decisions.rules import considered
from service.decisions.tables import DecisionRow
from service.edge.routes import PeoplesRoute
from service.jobs.queries import situation
from service.jobs.rules import Do, next_action
from service.jobs.tables import ENDED, JobRow
from service.paging import PagesOf
from service.planner.inputs import PlannerVerdict
from service.planner.losses import loss_plans
from service.problems import conflict, invalid, not_found
from service.reconcilers.jobs import limits_of

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])
WITHOUT_MAX = 64


class AlternativeOut(BaseModel):
    """A layout that was possible, and its score."""

    layout: str
    nodes: int
    step_s: float = Field(description="Seconds of a step.")
    measured: bool = Field(description="Whether this job has run so; else it is predicted.")
    step_error: float | None = Field(default=None, description="By how much of itself step_s may be off; measured: 0.")
    predicted_s: float | None = Field(default=None, description="What is predicted of it from the other layouts.")


class LossOut(BaseModel):
    """What a job would run in after a likely loss."""

    what: str
    nodes_lost: int
    layout: str | None = Field(description="Null where nothing is left to run on.")
    step_s: float | None
    step_error: float | None = Field(description="By how much of itself step_s may be off; measured: 0.")
    times_slower: float | None = Field(description="Than now.")
    reason: str


class PlanOut(BaseModel):
    """What the service would decide about a job now."""

    job_id: str
    verdict: PlannerVerdict
    verdict_reason: str
    layout: str | None = Field(description="Where it would go; null where it stays or can go nowhere.")
    nodes: list[str]
    alternatives: list[AlternativeOut] = Field(description="The best first.")
    inputs_digest: str
    action: Do | None = Field(description="What the service does next. Null where nodes are taken away in thought.")
    reason: str
    losses: list[LossOut] = Field(description="What is planned for each kind of likely loss; empty of a waiting job.")


class DecisionOut(BaseModel):
    """One decision. It is stored when it differs from the one before."""

    decision_id: int
    job_id: str
    decided_at: datetime
    action: Do = Field(description="What the service did.")
    reason: str
    asked_by: str = Field(description="The name of a token, the nodes whose notices came, or the service itself.")
    verdict: PlannerVerdict = Field(description="What the planner wanted.")
    verdict_reason: str
    layout: str | None
    nodes: list[str]
    alternatives: list[AlternativeOut]
    inputs_digest: str = Field(description="The same for the same inputs.")


@router.get("/{job_id}/decisions", operation_id="list_decisions", summary="Decisions about a job, newest first")
def list_all(session: SessionOf, job_id: JobId, pages: PagesOf) -> list[DecisionOut]:
    """The newest ones are kept."""
    if session.get(JobRow, job_id) is None:
        raise not_found("job", job_id)
    found = pages.newest(session, select(DecisionRow).where(DecisionRow.job_id == job_id), DecisionRow.decision_id)
    return [DecisionOut.model_validate(row, from_attributes=True) for row in found]


@router.get("/{job_id}/plan", operation_id="show_plan", summary="What would be decided about a job now")
def show_plan(
    context: ContextOf,
    session: SessionOf,
    job_id: JobId,
    without: Annotated[
        list[NodeId] | None,
        Query(max_length=WITHOUT_MAX, description="As if this node were gone; may be given several times."),
    ] = None,
) -> PlanOut:
    """By the function that decides, and without acting."""
    row = session.get(JobRow, job_id)
    if row is None:
        raise not_found("job", job_id)
    if row.state in ENDED:
        raise conflict(f"job {job_id} has ended: it is {row.state}")
    facts = situation(session, row, poll_s=context.settings.agent_poll_s, now=context.clock())
    gone = tuple(without or ())
    if unknown := sorted(set(gone) - {node.node_id for node in considered(facts).inputs.nodes}):
        raise invalid(FieldProblem(field="without", rule=f"must be nodes that the job may use, not {unknown[0]}"))
    found = considered(facts, gone)
    action = None if gone else next_action(facts.view, limits_of(context.settings))
    return PlanOut(
        job_id=job_id,
        verdict=found.decision.verdict,
        verdict_reason=found.decision.reason,
        layout=found.layout,
        nodes=list(found.nodes),
        alternatives=[AlternativeOut.model_validate(item, from_attributes=True) for item in found.alternatives()],
        inputs_digest=found.inputs.digest(),
        action=action.do if action else None,
        reason=action.reason if action else "",
        losses=[LossOut.model_validate(item, from_attributes=True) for item in loss_plans(found.inputs)],
    )
