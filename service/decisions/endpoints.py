"""REST of decisions: list those about a job, show the one that would be made now."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy import select

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile import PolicyRules
from liver_core.layout.limits import JobId, NodeId
from service.context import PERSON_ONLY, ContextOf, SessionOf
from service.decisions.rules import OPTIONS_MAX, considered, made_from, wanted
from service.decisions.tables import DecisionRow
from service.edge.routes import PeoplesRoute
from service.jobs.queries import situation
from service.jobs.rules import next_action
from service.jobs.tables import ENDED, JobRow
from service.jobs.view import Do
from service.paging import PagesOf
from service.planner.goals import Alert
from service.planner.inputs import PlannerVerdict
from service.planner.losses import loss_plans
from service.policy.types import Market
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


class OptionOut(BaseModel):
    """A number of nodes that was weighed, in its best layout."""

    nodes: int
    layout: str
    step_s: float
    usd_per_hour: float | None = Field(description="Of the nodes; null where a price is not known.")
    usd_per_hour_worth: float | None = Field(
        description="What its tokens bring beyond what it costs; null where policy.usd_per_mtok is not given."
    )


class PoolWantOut(BaseModel):
    """Nodes of one pool that a job should have."""

    pool: str
    place: str = Field(description="The zone or the pool where its world must lie; empty where it may lie anywhere.")
    market: Market
    usd_per_hour: float = Field(description="Of one.")
    held: int = Field(description="Nodes that are up and that it may use.")
    hold: int = Field(description="Nodes that it should have; what is missing would be bought.")


class WeighedOut(BaseModel):
    """An option that the policy weighed."""

    layout: str
    place: str
    nodes: int
    spares: int = 0
    hold: list[tuple[str, int]] = Field(description="Nodes to have of each pool, spares too.")
    usd_per_hour: float
    utility_usd_per_hour: float = Field(description="What its tokens bring beyond all that it costs.")


class WantedOut(BaseModel):
    """What a job should have, by its policy. Nobody buys or ends machines by it yet."""

    layout: str
    place: str
    nodes: int = Field(description="That it would run on.")
    spares: int = Field(description="Beside them.")
    usd_per_hour: float
    usd_per_hour_worth: float = Field(description="What its tokens bring beyond all that it costs.")
    pools: list[PoolWantOut]
    gives_back: list[str] = Field(description="Free nodes that buy it nothing.")
    weighed: list[WeighedOut] = Field(description="What it was chosen from, the best first.")
    reason: str


class NodeKindOut(BaseModel):
    """Nodes that are alike."""

    nodes: int
    slots: int
    pool: str = ""
    zone: str = ""
    device: str = ""
    is_at_risk: bool = False
    is_overdue: bool = False
    usd_per_hour: float | None = Field(default=None, description="Of one; null where not known or not asked for.")


class WorldBefore(BaseModel):
    """What the job ran on."""

    generation: int
    layout: str
    nodes: int


class MeasuredStep(BaseModel):
    """The median step of a layout that ran."""

    layout: str
    step_s: float


class RemainingOut(BaseModel):
    """What was left, to three digits. Null where the job file sets no such bound."""

    steps: int
    deadline_in_s: float | None = None
    usd: float | None = None


class PoolMarketOut(BaseModel):
    """A pool's price and losses, as the decision took them."""

    pool: str
    usd_per_hour: float | None = None
    on_demand_usd_per_hour: float | None = None
    life_s: float | None = Field(default=None, description="Expected time to its next loss, to one digit.")
    losses: int = Field(default=0, description="Nodes lost within three minutes count as one.")
    egress_usd_per_gb: float | None = Field(default=None, description="Of 10^9 bytes that leave it.")
    offered: int = Field(default=0, description="Nodes that are taken to be there to buy, as it is priced.")
    on_demand_offered: int = Field(default=0, description="The same on demand.")
    ours: int | None = Field(default=None, description="Nodes of ours there, to two digits: losses fall among them.")
    watched_h: float = Field(default=0.0, description="Hours of the last 14 days in which it had nodes of ours.")
    volatility: float = Field(default=1.0, description="How many times more losses than expected came lately.")
    group_sizes: list[tuple[int, float]] = Field(default=[], description="Nodes lost at once, share of the losses.")


class ChangeOut(BaseModel):
    """What a change was taken to cost the job."""

    lost_s: float = Field(description="Training time that it loses, in seconds.")
    source: str = Field(description="By what: its own handoffs, the median of the newest; else benchmarks.")
    handoffs: int = Field(description="Its own ones, at least 3 and at most 8; 0: by benchmarks.")
    is_extrapolated: bool = Field(description="The job's state is smaller or larger than any in the benchmarks.")


class MadeFrom(BaseModel):
    """What a decision was made from, beside the job's model."""

    nodes: list[NodeKindOut] = []
    nodes_min: int = 0
    nodes_max: int = 0
    policy: PolicyRules = PolicyRules()
    world: WorldBefore | None = None
    steps: list[MeasuredStep] = []
    remaining: RemainingOut | None = None
    pools: list[PoolMarketOut] = Field(default=[], description="Of jobs that weigh prices.")
    change: ChangeOut | None = Field(default=None, description="Of jobs that weigh prices.")


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
    options: list[OptionOut] = Field(description="Numbers of nodes that were weighed by price, budget or deadline.")
    alerts: list[Alert] = Field(description="What a person should know; the reason says it in words.")
    wanted: WantedOut | None = Field(
        default=None, description="What the job should have; null without `policy`, and where nothing could be weighed."
    )
    made_from: MadeFrom
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
    options: list[OptionOut] = Field(description="Numbers of nodes that were weighed by price, budget or deadline.")
    alerts: list[Alert] = Field(description="What a person should know; the reason says it in words.")
    wanted: WantedOut | None = Field(
        default=None, description="What the job should have; null without `policy`, and where nothing could be weighed."
    )
    made_from: MadeFrom = Field(validation_alias="inputs")
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
        options=[OptionOut.model_validate(item, from_attributes=True) for item in found.decision.options[:OPTIONS_MAX]],
        alerts=list(found.decision.alerts),
        wanted=WantedOut.model_validate(want) if (want := wanted(found.decision)) is not None else None,
        made_from=MadeFrom.model_validate(made_from(found.inputs)),
        inputs_digest=found.inputs.digest(),
        action=action.do if action else None,
        reason=action.reason if action else "",
        losses=[LossOut.model_validate(item, from_attributes=True) for item in loss_plans(found.inputs)],
    )
