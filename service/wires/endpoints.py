"""REST of wires: how the nodes of a job read each other's state."""

from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel, Field

from agent.protocol.wires import WireKind
from liver_core.layout.limits import JobId
from service.context import PERSON_ONLY, SessionOf
from service.edge.routes import PeoplesRoute
from service.jobs.queries import job_file_of
from service.jobs.tables import ENDED, GenerationRow, JobRow, JobState
from service.planner.change_cost import state_bytes
from service.problems import not_found
from service.wires.queries import move_over, wires_between
from service.wires.tables import WireRow

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=PeoplesRoute, dependencies=[PERSON_ONLY])


class WireOut(BaseModel):
    """How `target` reads `source`."""

    source: str
    target: str
    wire: WireKind | None = Field(description="Null: nothing could be read; `failed` says why.")
    live: bool = Field(description="Whether state streams over it while the job trains.")
    bytes_per_s: float = Field(description="Of one reader, in host memory, while the job trained.")
    latency_s: float = Field(description="Of a read of 64 bytes.")
    refused: list[str] = Field(description="Why no better wire is taken, the best one first.")
    failed: str
    measured_at: datetime


class WiresOut(BaseModel):
    """The wires between the nodes of a job's present world, and what moving all of its state over them would take."""

    nodes: list[str] = Field(description="Of the present world; empty where the job does not run.")
    wires: list[WireOut] = Field(description="As measured. Nodes that share an address have none.")
    state_bytes: float = Field(description="Masters and moments of the whole job, by the job file.")
    move_s: float | None = Field(description="Seconds for all of that, each node to one other; null: not measured.")
    live: bool | None = Field(description="Whether the job would train meanwhile; null: not measured.")


@router.get(
    "/{job_id}/wires", operation_id="list_wires", summary="Wires between a job's nodes", response_model=WiresOut
)
def show(session: SessionOf, job_id: JobId) -> WiresOut:
    """Agents measure while the job trains undisturbed, about half a minute after a world began and then once an hour:
    each node reads the next one that has another address."""
    job = session.get(JobRow, job_id)
    if job is None:
        raise not_found("job", job_id)
    world = None
    if job.active_generation is not None and job.state not in (*ENDED, JobState.SUSPENDED):
        world = session.get(GenerationRow, (job_id, job.active_generation))
    members = () if world is None else world.roster["members"]
    nodes = list(dict.fromkeys(str(member["node_id"]) for member in members))
    rows = wires_between(session, job_id, nodes)
    size, seconds, is_live = move_over(rows, state_bytes(job_file_of(job)), len(nodes))
    return WiresOut(nodes=nodes, wires=[_wire(row) for row in rows], state_bytes=size, move_s=seconds, live=is_live)


def _wire(row: WireRow) -> WireOut:
    kind = None if row.wire is None else WireKind(row.wire)
    return WireOut(
        source=row.source,
        target=row.target,
        wire=kind,
        live=kind is not None and kind.is_live,
        bytes_per_s=row.bytes_per_s,
        latency_s=row.latency_s,
        refused=list(row.refused),
        failed=row.failed,
        measured_at=row.measured_at,
    )
