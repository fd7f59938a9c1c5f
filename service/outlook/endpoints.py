"""REST of what a job's page says first: the sentence, the ranks by node, the first error."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from liver_core.layout import ParallelLayout, from_json
from liver_core.layout.limits import COUNT_MAX, JobId
from service.context import PERSON_ONLY, ContextOf, SessionOf
from service.edge.routes import PeoplesRoute
from service.jobs.causes import FirstCause
from service.jobs.tables import JobRow, JobState
from service.nodes.tables import NodeState
from service.notices.queries import as_fact
from service.notices.rules import earliest_deadline
from service.outlook.queries import (
    WorldNow,
    first_error,
    generations_with_errors,
    outlook_of,
    world_of,
)
from service.outlook.rules import Mood
from service.problems import not_found
from service.reconcilers.jobs import limits_of

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class OutlookOut(BaseModel):
    """Where a job stands and what happens next."""

    job_id: str
    state: JobState
    level: Mood = Field(description="good, busy (it moves by itself), waiting (for nodes or somebody), bad, ended.")
    now: str
    next: str
    warning: str = Field(description="What goes wrong although the job goes on; empty where nothing does.")
    since: datetime = Field(description="Since when it has been in this state.")
    deadline_at: datetime | None = Field(description="When the first of its nodes goes.")
    last_step: int
    stop_steps: int
    last_step_at: datetime | None
    steps_per_s: float | None
    remaining_s: float | None
    handoff_id: UUID | None
    incident_ids: list[int]


class IfGoneOut(BaseModel):
    """What the agents do at once if the node goes."""

    layout: str | None = Field(description="Null: nothing fits, it would start again from a checkpoint once nodes do.")
    nodes: list[str]
    reason: str


class WorldNodeOut(BaseModel):
    """A node of the job's world."""

    node_id: str
    pool: str | None
    state: NodeState | None
    leaving: bool
    deadline_at: datetime | None
    incident_id: int | None
    ranks: list[int]
    if_gone: IfGoneOut | None = Field(description="Null where there is no standing plan: ask for the plan without it.")


class CoordinatesOut(BaseModel):
    """The place of a rank on every axis. EP, ETP and expert DP cut the ranks of a stage once more, for experts; they
    are null for a model that has none."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int | None
    etp: int | None
    edp: int | None


class ExpertsOut(BaseModel):
    """Which experts of each layer that has some, by number, both ends included."""

    first: int
    last: int


class RankOut(BaseModel):
    """A rank of the job's world. `stage`, `step`: as its agent last reported."""

    rank: int
    node_id: str
    slot: int
    coordinates: CoordinatesOut
    experts: ExpertsOut | None = Field(description="Null for a model that has none.")
    stage: str | None
    step: int | None


class RanksOut(BaseModel):
    """The ranks of a job's active generation, in order, and their nodes."""

    job_id: str
    generation: int | None
    layout: str | None
    sizes: CoordinatesOut | None = Field(description="How many ranks each axis has.")
    ranks: list[RankOut]
    nodes: list[WorldNodeOut]


class FirstErrorOut(BaseModel):
    """The first error among the logs of all ranks, by the order in which the service got them."""

    job_id: str
    generations: list[int] = Field(description="Whose logs were searched.")
    generation: int | None
    rank: int | None
    node_id: str | None
    log_id: int | None = Field(description="The piece of the log, for `after` of the logs (less one).")
    offset: int | None
    at: datetime | None
    line: str | None = Field(description="What went wrong; of a traceback its last line.")
    excerpt: list[str]
    cause: FirstCause | None = Field(description="What the agents say ended the generation.")


@router.get("/{job_id}/outlook", operation_id="show_outlook", summary="Where a job stands and what happens next")
def show(context: ContextOf, session: SessionOf, job_id: JobId) -> OutlookOut:
    """In words; what comes next is by the function that decides."""
    row = _job(session, job_id)
    limits, poll_s = limits_of(context.settings), context.settings.agent_poll_s
    found = outlook_of(session, row, limits, poll_s=poll_s, now=context.clock())
    return OutlookOut(
        job_id=job_id,
        state=JobState(row.state),
        level=found.said.level,
        now=found.said.now,
        next=found.said.next,
        warning=row.warning,
        since=row.state_changed_at,
        deadline_at=found.deadline_at,
        last_step=row.last_step,
        stop_steps=int(row.spec["stop"]["steps"]),
        last_step_at=row.last_step_at,
        steps_per_s=found.pace.steps_per_s,
        remaining_s=found.pace.remaining_s,
        handoff_id=UUID(str(found.handoff_id)) if found.handoff_id is not None else None,
        incident_ids=list(found.incidents),
    )


@router.get("/{job_id}/ranks", operation_id="show_ranks", summary="Ranks of a job by node")
def ranks(context: ContextOf, session: SessionOf, job_id: JobId) -> RanksOut:
    """With the coordinates of each, and what the agents do at once if a node goes."""
    row = _job(session, job_id)
    found = world_of(session, row, now=context.clock())
    if found is None:
        return RanksOut(job_id=job_id, generation=None, layout=None, sizes=None, ranks=[], nodes=[])
    layout = found.roster.layout
    return RanksOut(
        job_id=job_id,
        generation=found.generation,
        layout=str(layout),
        sizes=sizes_of(layout, _num_experts(row)),
        ranks=_ranks(found, row),
        nodes=_nodes(found, row),
    )


@router.get("/{job_id}/first-error", operation_id="show_first_error", summary="The first error of a job")
def show_first_error(
    session: SessionOf,
    job_id: JobId,
    generation: Annotated[
        int | None,
        Query(ge=1, le=COUNT_MAX, description="Only of this one; else the last that failed, and the newest."),
    ] = None,
) -> FirstErrorOut:
    """Among the logs of all ranks, as far as they are kept. Fields are null where none is found."""
    _job(session, job_id)
    rows = generations_with_errors(session, job_id, generation)
    pairs = ((row, first_error(session, row)) for row in rows)
    row, error = next(((row, error) for row, error in pairs if error is not None), (rows[0] if rows else None, None))
    return FirstErrorOut(
        job_id=job_id,
        generations=[row.generation for row in rows],
        generation=error.generation if error is not None else None,
        rank=error.rank if error is not None else None,
        node_id=error.node_id if error is not None else None,
        log_id=error.log_id if error is not None else None,
        offset=error.offset if error is not None else None,
        at=error.at if error is not None else None,
        line=error.line if error is not None else None,
        excerpt=list(error.excerpt) if error is not None else [],
        cause=FirstCause.of(row.ended_by) if row is not None else None,
    )


def _num_experts(row: JobRow) -> int:
    """Of each layer that has some; 0 for a dense model."""
    return row.spec["model"].get("num_experts") or 0


def sizes_of(layout: ParallelLayout, num_experts: int) -> CoordinatesOut:
    """Of each axis, for a model with so many experts in a layer."""
    ep, etp, edp = (layout.ep, layout.expert_tp, layout.expert_dp) if num_experts else (None, None, None)
    return CoordinatesOut(tp=layout.tp, pp=layout.pp, cp=layout.cp, dp=layout.dp, ep=ep, etp=etp, edp=edp)


def rank_place(layout: ParallelLayout, rank: int, num_experts: int) -> tuple[CoordinatesOut, ExpertsOut | None]:
    """Where a rank stands, and which of so many experts of a layer it has."""
    at, each = layout.coordinates(rank), num_experts // layout.ep
    ep, etp, edp = (at.ep, at.etp, at.edp) if num_experts else (None, None, None)
    coordinates = CoordinatesOut(tp=at.tp, pp=at.pp, cp=at.cp, dp=at.dp, ep=ep, etp=etp, edp=edp)
    return coordinates, ExpertsOut(first=at.ep * each, last=(at.ep + 1) * each - 1) if num_experts else None


def _ranks(found: WorldNow, row: JobRow) -> list[RankOut]:
    said = {
        (node_id, rank["rank"]): rank
        for node_id, node in found.nodes.items()
        for rank in node.ranks
        if rank["job_id"] == row.job_id and rank["generation"] == found.generation
    }
    shown, num_experts = [], _num_experts(row)
    for number, member in enumerate(found.roster.members):
        coordinates, experts = rank_place(found.roster.layout, number, num_experts)
        rank = said.get((member.node_id, number), {})
        shown.append(
            RankOut(
                rank=number,
                node_id=member.node_id,
                slot=member.slot,
                coordinates=coordinates,
                experts=experts,
                stage=rank.get("stage"),
                step=rank.get("step"),
            )
        )
    return shown


def _nodes(found: WorldNow, row: JobRow) -> list[WorldNodeOut]:
    plans = {plan["leaving"][0]: plan for plan in row.standing_plans if len(plan["leaving"]) == 1}
    ranks: dict[str, list[int]] = {node_id: [] for node_id in found.roster.node_ids()}
    for number, member in enumerate(found.roster.members):
        ranks[member.node_id].append(number)
    shown = []
    for node_id, numbers in ranks.items():
        node, notices, plan = found.nodes.get(node_id), found.going.get(node_id, []), plans.get(node_id)
        first = notices[0] if notices else None
        shown.append(
            WorldNodeOut(
                node_id=node_id,
                pool=node.pool if node is not None else None,
                state=NodeState(node.state) if node is not None else None,
                leaving=bool(notices),
                deadline_at=earliest_deadline(map(as_fact, notices)),
                incident_id=(first.occurrence_id or first.notice_id) if first is not None else None,
                ranks=numbers,
                if_gone=_if_gone(plan) if plan is not None else None,
            )
        )
    return shown


def _if_gone(plan: dict) -> IfGoneOut:
    target = plan.get("target")
    if target is None:
        return IfGoneOut(layout=None, nodes=[], reason=plan["reason"])
    nodes = list(dict.fromkeys(member["node_id"] for member in target["members"]))
    return IfGoneOut(layout=str(from_json(ParallelLayout, target["layout"])), nodes=nodes, reason=plan["reason"])


def _job(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id)
    if row is None:
        raise not_found("job", job_id)
    return row
